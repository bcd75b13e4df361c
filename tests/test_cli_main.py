"""The program as a whole: help without JAX, exit codes, errors as sentences, warnings once."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run
from tiny_text import write_text_drafter, write_text_target

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("demo", "generate", "chat", "serve", "plan", "convert", "doctor", "train")
LOADED = """
import sys
from dflash_jax.cli.main import main
try:
    main()
finally:
    print([name for name in ("jax", "flax", "numpy") if name in sys.modules], file=sys.stderr)
"""


def process(*words: object, code: str = LOADED) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("main") / "target")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_drafter(tmp_path_factory.mktemp("main") / "drafter")


@pytest.mark.parametrize(
    "words", [(), *((name,) for name in COMMANDS)], ids=lambda words: "-".join(words)
)
def test_help_takes_less_than_a_second_and_no_jax(words: tuple[str, ...]):
    before = cpu_seconds()
    done = process(*words, "--help")
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert " ".join(("Usage: dflash-jax", *words)) in done.stdout
    assert cpu_seconds() - before < 1.0  # of the processor: a busy machine is not at fault


def test_help_names_every_command_and_nothing_else():
    listed = re.findall(r"^│ (\w+) ", run("--help").stdout, flags=re.M)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_version_is_that_of_the_package():
    import dflash_jax

    assert run("--version").stdout.strip() == dflash_jax.__version__


@pytest.mark.parametrize(
    "words",
    [
        ("nothing",),
        ("generate",),
        ("generate", "demo"),
        ("generate", "demo", "x", "--nothing"),
        ("generate", "demo", "x", "--max-tokens", "many"),
        ("generate", "demo", "x", "--prompts", "no/such/file.jsonl"),
        ("convert", "demo", "x", "--to", "pickle"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_leaves_stdout_empty(words: tuple[str, ...]):
    ran = run(*words)
    assert (ran.code, ran.stdout) == (2, "")
    assert "Usage: " in ran.stderr


REFUSED = {
    "a path that is not there": (["./no/such"], "no folder ./no/such"),
    "a folder without config": (["{empty}"], "config.json"),
    "width above the trained one": (["{target}", "-d", "{drafter}", "-k", "9"], "most 3 drafts"),
    "a width without a drafter": (["{target}", "-k", "3"], "without a drafter"),
    "a drafter of another target": (["{target}", "-d", "{other}"], "the target's width is 32"),
    "a drafter in the target's place": (["{drafter}", "-d", "{drafter}"], "error: "),
    "a served length of nothing": (["{target}", "--max-seq-len", "0"], "max_seq_len=0"),
    "beyond the positions": (["{target}", "--max-seq-len", "513"], "512 positions"),
    "no tokens": (["{target}", "--max-tokens", "0"], "max_tokens=0"),
    "a negative temperature": (["{target}", "--temperature", "-1"], "temperature=-1.0"),
    "a negative seed": (["{target}", "--seed", "-1"], "seed=-1"),
    "words for ids": (["{target}", "--token-ids"], "'hello' does not hold token ids"),
}


@pytest.mark.parametrize("words, said", REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_one_sentence_and_ends_with_2(
    words: list[str], said: str, target: Path, drafter: Path, tmp_path: Path
):
    (tmp_path / "empty").mkdir()
    write_text_drafter(tmp_path / "other", hidden_size=16)
    folders = {"target": target, "drafter": drafter}
    folders |= {name: tmp_path / name for name in ("empty", "other")}
    ran = run("generate", *(word.format(**folders) for word in words), "--json", "--", "hello")
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert re.search(r"^error: ", ran.stderr, flags=re.M)


def test_a_download_that_fails_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_jax.weights.demo import TARGET_SOURCE

    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    (tmp_path / TARGET_SOURCE.gguf).write_bytes(b"something else")
    ran = run("generate", "demo", "x")
    assert (ran.code, ran.stdout) == (1, "")
    assert f"expected {TARGET_SOURCE.gguf_sha256}" in ran.stderr


def test_a_destination_that_cannot_be_written_ends_with_1(drafter: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    ran = run("convert", drafter, tmp_path / "file" / "below")
    assert ran.code == 1
    assert re.search(r"^error: .*file", ran.stderr, flags=re.M)


def test_the_program_itself_shows_no_traceback_for_a_mistake(target: Path, drafter: Path):
    done = process("generate", target, "hello", "-d", drafter, "-k", 9)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: max_draft_len=9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_of_ours_is_not_hidden(target: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_jax.cli import start

    monkeypatch.setattr(start, "fetch_demo", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run("generate", target, "hello")


def test_a_warning_comes_before_the_error_that_ends_the_start(target: Path, drafter: Path):
    ran = run("generate", target, "x", "-d", drafter, "-k", 1, "--max-seq-len", 513)
    assert ran.code == 2
    assert ran.stderr.count("warning: max_draft_len=1 is narrower") == 1
    assert ran.stderr.index("warning: ") < ran.stderr.index("error: max_seq_len=513")


def test_every_public_name_is_there_though_imported_late():
    import dflash_jax

    assert set(dflash_jax.__all__) <= set(dir(dflash_jax))
    assert all(getattr(dflash_jax, name).__name__ == name for name in dflash_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dflash_jax.nothing  # noqa: B018
