"""What `LLM` refuses from files and options before it compiles, loads or starts a backend.

Numbers in messages are checked here; the rules alone in test_planning_rules.py, requests to a
running engine in test_llm_bad_input.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from byte_tokenizer import byte_level, write_folder
from dflash_jax.serving import engine as engines
from dflash_jax.serving import loading
from dflash_jax.serving.compiles import CompileCounter
from tiny import write_drafter, write_target
from tiny_served import SMALL
from tiny_text import SPECIALS, write_text_drafter, write_text_target


@pytest.fixture
def no_compile(monkeypatch) -> Iterator[None]:
    """Fails the test if a program is built or loaded weights reach the engine."""

    def fail(*args: object, **kwargs: object) -> None:
        pytest.fail("something was compiled or loaded before the refusal")

    monkeypatch.setattr(engines, "compile_program", fail)
    monkeypatch.setattr(loading, "load_target", fail)
    counter = CompileCounter()
    yield
    counter.close()
    assert counter.count == 0


def refusal(target: Path, drafter: Path | None = None, **options: Any) -> str:
    """The message of the error that a start ends with."""
    with pytest.raises(dj.DFlashError) as refused:
        dj.LLM(target, drafter, **{**SMALL, **options})
    assert isinstance(refused.value, ValueError)
    return str(refused.value)


def tiny_pair(folder: Path, **drafter: Any) -> tuple[Path, Path]:
    return write_target(folder / "t"), write_drafter(folder / "d", **drafter)


@pytest.mark.parametrize(
    "changes, numbers",
    [
        ({"target_hidden_size": 48}, ("target_hidden_size is 48", "width is 32")),
        ({"vocab_size": 5000}, ("5000 ids", "97")),
        ({"num_target_layers": 36}, ("36 layers", "this one has 4")),
        (
            {
                "num_target_layers": None,
                "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 7]},
            },
            ("block 7", "0 to 3"),
        ),
    ],
    ids=["width", "vocabulary", "depth", "layer ids"],
)
@pytest.mark.usefixtures("no_compile")
def test_a_drafter_made_for_another_target_is_refused_with_both_numbers(tmp_path, changes, numbers):
    message = refusal(*tiny_pair(tmp_path, **changes))
    assert all(number in message for number in numbers)
    assert "drafter of this target" in message or "must be equal" in message


@pytest.mark.usefixtures("no_compile")
def test_a_drafter_that_numbers_tokens_otherwise_is_refused_by_the_first_id(tmp_path):
    """Fault 94: two byte tokenizers, one with ids 97 and 98 swapped."""
    tokenizer = byte_level(SPECIALS)
    drafter = write_folder(write_text_drafter(tmp_path / "d"), tokenizer)
    saved = drafter / "tokenizer.json"
    swapped = saved.read_text().replace('"a": 97', '"a": 98', 1).replace('"b": 98', '"b": 97', 1)
    assert swapped != saved.read_text()
    saved.write_text(swapped)
    message = refusal(write_text_target(tmp_path / "t"), drafter)
    assert "id 97" in message and "'b'" in message and "'a'" in message


def test_a_drafter_that_brings_the_same_tokenizer_is_accepted(tmp_path):
    """Fault 94, the other side."""
    drafter = write_folder(write_text_drafter(tmp_path / "d"), byte_level(SPECIALS))
    own = loading.read_tokenizer(write_text_target(tmp_path / "t"))
    assert loading.check_tokenizers(own, drafter) is None


@pytest.mark.usefixtures("no_compile")
def test_a_served_length_beyond_the_positions_is_refused(tmp_path):
    message = refusal(write_target(tmp_path / "t"), max_seq_len=513)
    assert "max_seq_len=513" in message and "512 positions" in message
    assert "rope_scaling" in message


@pytest.mark.usefixtures("no_compile")
def test_a_block_wider_than_trained_is_refused(tmp_path):
    message = refusal(*tiny_pair(tmp_path), max_draft_len=4)
    assert "max_draft_len=4" in message and "max_draft_len <= 3" in message


@pytest.mark.usefixtures("no_compile")
def test_unknown_options_are_listed_with_what_there_is(tmp_path):
    message = refusal(write_target(tmp_path / "t"), max_tokens=5, batch=1)
    assert "max_tokens, batch" in message
    assert "max_seq_len" in message and "kv_layout" in message


@pytest.mark.usefixtures("no_compile")
def test_options_that_this_build_has_no_code_for_are_refused(tmp_path):
    message = refusal(write_target(tmp_path / "t"), attention="cudnn", dtype="int8")
    assert "attention='cudnn'" in message and "'xla'" in message
    assert "dtype='int8'" in message and "'bfloat16'" in message


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.usefixtures("no_compile")
def test_a_truncated_weight_file_is_refused_by_name(tmp_path, part):
    pair = dict(zip(("target", "drafter"), tiny_pair(tmp_path), strict=True))
    file = pair[part] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(pair["target"], pair["drafter"])
    assert "model.safetensors" in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip archive, not safetensors", b"\0" * 64])
@pytest.mark.usefixtures("no_compile")
def test_a_file_that_is_not_safetensors_is_refused_by_name(tmp_path, content):
    target = write_target(tmp_path / "t")
    (target / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(target)


@pytest.mark.usefixtures("no_compile")
def test_a_folder_without_a_config_is_refused(tmp_path):
    target, drafter = tiny_pair(tmp_path)
    (drafter / "config.json").unlink()
    message = refusal(target, drafter)
    assert str(drafter) in message and "config.json" in message
    (target / "config.json").unlink()
    message = refusal(target)
    assert str(target) in message and "config.json" in message


@pytest.mark.usefixtures("no_compile")
def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(dj.DFlashError, match="nowhere"):
        dj.LLM(tmp_path / "nowhere")


# A platform that JAX does not know: whoever starts a backend ends with another error.
GATE = """
import sys
import dflash_jax as dj
try:
    dj.LLM(sys.argv[1], sys.argv[2] or None, **eval(sys.argv[3]))
except dj.DFlashError as error:
    print("refused:", error)
"""


def in_a_fresh_process(target: Path, drafter: Path | str, options: dict[str, Any]) -> str:
    command = [sys.executable, "-c", GATE, str(target), str(drafter), repr(options)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={"JAX_PLATFORMS": "none_such"}, check=False
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    "damage, options, expected",
    [
        ("weights", {}, "model.safetensors"),
        (None, {"max_seq_len": 513}, "512 positions"),
        (None, {"max_draft_len": 9}, "max_draft_len <= 3"),
        (None, {"dtype": "int8"}, "dtype='int8'"),
        ("tokenizer", {}, "id 97"),
    ],
    ids=["weights", "positions", "width", "dtype", "tokenizer"],
)
def test_files_and_options_are_refused_before_a_backend_starts(tmp_path, damage, options, expected):
    """Gate (i)."""
    if damage == "tokenizer":
        pair = write_text_target(tmp_path / "t"), write_text_drafter(tmp_path / "d")
        saved = write_folder(pair[1], byte_level(SPECIALS)) / "tokenizer.json"
        text = saved.read_text().replace('"a": 97', '"a": 98', 1).replace('"b": 98', '"b": 97', 1)
        saved.write_text(text)
    else:
        pair = tiny_pair(tmp_path)
    if damage == "weights":
        file = pair[1] / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    said = in_a_fresh_process(*pair, options)
    assert "refused:" in said and expected in said


def test_the_process_of_that_test_cannot_start_a_backend(tmp_path):
    """The control: with nothing to refuse it goes on and fails at the backend."""
    said = in_a_fresh_process(*tiny_pair(tmp_path), {})
    assert "refused:" not in said and "none_such" in said
