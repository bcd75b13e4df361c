"""`dflash-jax plan`: table, JSON, sweep and exit codes, from config files alone."""

import json
from pathlib import Path

import pytest

import tiny
from command_line import run
from planning_pairs import QWEN3_8B_CONFIG, QWEN3_8B_DRAFTER_CONFIG
from test_cli_main import process

SERVED = ("--max-seq-len", 49152, "--max-batch-size", 16)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with nothing but config.json."""
    folders = []
    for name, config in (("target", QWEN3_8B_CONFIG), ("drafter", QWEN3_8B_DRAFTER_CONFIG)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        folders.append(folder)
    return folders[0], folders[1]


def test_what_does_not_fit_is_shown_and_ends_with_exit_code_2(configs):
    target, drafter = configs
    ran = run("plan", target, "--drafter", drafter, *SERVED, "--device-memory", "80GiB")
    assert ran.code == 2 and ran.stdout == ""
    text = " ".join(ran.stderr.split())
    for expected in (
        "KV arena 108.04 GiB",
        "context arena 15.00 GiB",
        "target weights 15.26 GiB",
        "needed 140.48 GiB",
        "verdict: refused",
        "set max_batch_size <= 8 (7 with the reserve)",
        "set max_seq_len <= 24981 (22584 with the reserve)",
    ):
        assert expected in text


def test_what_fits_ends_with_exit_code_0(configs):
    target, drafter = configs
    ran = run("plan", target, "-d", drafter, "--max-seq-len", 4096, "--device-memory", "80GiB")
    assert ran.code == 0 and "verdict: fits" in ran.stderr


def test_json_is_one_document_with_the_same_numbers(configs):
    target, drafter = configs
    ran = run("plan", target, "-d", drafter, *SERVED, "--device-memory", 80 * 2**30, "--json")
    document = ran.document
    assert ran.code == 2
    assert document["verdict"] == "refused" and document["fits"] is False
    assert document["rows"]["KV arena"]["bytes"] == 16 * 36 * 2 * 8 * 49168 * 128 * 2
    assert document["needed"] == sum(row["bytes"] for row in document["rows"].values())
    assert document["largest_batch_size"] == 7
    assert document["largest_unproven_batch_size"] == 8


def test_the_sweep_gives_a_batch_for_every_length_and_never_a_larger_one_for_a_longer(configs):
    target, drafter = configs
    card = ("--card", "80GiB", "--mem-fraction", 0.9)
    ran = run("plan", target, "-d", drafter, *card, "--sweep", "--json")
    batches = [row["largest_batch_size"] for row in ran.document["sweep"]]
    lengths = [row["max_seq_len"] for row in ran.document["sweep"]]
    assert ran.code == 0
    assert lengths == [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    assert batches == sorted(batches, reverse=True) and batches[0] > batches[-1] > 0
    assert "1,024" in run("plan", target, "-d", drafter, *card, "--sweep").stderr


def test_a_plan_of_a_card_starts_no_backend(configs):
    """JAX is told a platform that does not exist."""
    target, drafter = configs
    code = (
        "import os; os.environ['JAX_PLATFORMS'] = 'nowhere'\n"
        "from dflash_jax.cli.main import main\nmain()"
    )
    ran = process("plan", target, "-d", drafter, "--card", "24GiB", "--json", code=code)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["device"]["overhead"] == 4 * 2**30


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--device-memory", "lots"), "device_memory='lots'"),
        (("--card", "80GiB", "--mem-fraction", 1.5), "mem_fraction=1.5"),
        (("--device-memory", "80GiB", "--card", "80GiB"), "two ways"),
        (("--device-memory", "80GiB", "--max-draft-len", 16), "max_draft_len <= 15"),
        (("--device-memory", "80GiB", "--kv-memory-fraction", 0.5), "kv_layout='paged'"),
    ],
)
def test_wrong_options_are_refused_with_exit_code_2(configs, words, expected):
    target, drafter = configs
    ran = run("plan", target, "-d", drafter, *words)
    assert ran.code == 2 and expected in ran.stderr


def test_a_folder_with_weights_is_sized_by_its_headers(tmp_path):
    """128 rows in the file for 97 ids."""
    folder = tiny.write_target(tmp_path / "t")
    rows = run("plan", folder, "--device-memory", "1GiB", "--json").document["rows"]
    (folder / "model.safetensors").unlink()
    bare = run("plan", folder, "--device-memory", "1GiB", "--json").document["rows"]
    padding = 2 * (128 - 97) * 32 * 2
    assert rows["target weights"]["bytes"] - bare["target weights"]["bytes"] == padding


def test_a_word_outside_an_options_list_is_refused_with_the_list(configs):
    """In a process of its own, where no test checks types before the rules do."""
    target, drafter = configs
    ran = process(
        "plan",
        target,
        "-d",
        drafter,
        "--device-memory",
        "80GiB",
        "--headroom",
        "none",
        code="from dflash_jax.cli.main import main; main()",
    )
    assert ran.returncode == 2 and "headroom='none': 'measured' or 'seed' is needed" in ran.stderr
