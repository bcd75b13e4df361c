"""`train` from a file of prompts to a drafter that the demo can run."""

from pathlib import Path

import pytest

from command_line import run
from tiny_text import MASK, write_text_target

OPTIONS = (
    "--mask-token-id", MASK, "--layers", 1, "--taps", 1, "--block-size", 4, "--steps", 3,
    "--documents", 2, "--anchors", 2, "--max-answer-tokens", 32, "--max-batch-size", 1,
)  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"turns": ["{word}"]}}\n' for word in ("hi", "and", "so", "why")))
    return file


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("train") / "target")


def test_a_trained_drafter_loads_and_leaves_the_text_as_it_is(
    target: Path, prompts: Path, tmp_path: Path
):
    drafter = tmp_path / "drafter"
    ran = run("train", target, prompts, drafter, *OPTIONS, "--json")
    assert ran.code == 0
    assert (ran.document["drafter"], ran.document["steps"]) == (str(drafter), 3)
    assert "info: " in ran.stderr
    words = ("generate", target, "hi", "-n", 12, "--max-seq-len", 128, "--json")
    plain, drafted = run(*words).document, run(*words, "-d", drafter).document
    one, other = plain["completions"][0], drafted["completions"][0]
    assert one["token_ids"] == other["token_ids"]
    assert other["stats"]["num_drafts"] > 0


@pytest.mark.parametrize(
    "words, said",
    [
        (("--mask-token-id", 900), "mask_token_id 900 is outside the vocabulary of 261"),
        (("--layers", 9), "num_layers 9"),
        (("--block-size", 1), "block_size 1"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    words: tuple[object, ...], said: str, target: Path, prompts: Path, tmp_path: Path
):
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS, *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.work").exists()


def test_the_mask_id_is_asked_for_and_never_guessed(target: Path, prompts: Path, tmp_path: Path):
    ran = run("train", target, prompts, tmp_path / "new")
    assert ran.code == 2
    assert "--mask-token-id" in ran.stderr


def test_a_target_that_cannot_chat_is_refused_before_the_engine_starts(
    prompts: Path, tmp_path: Path
):
    target = write_text_target(tmp_path / "mute", template=None)
    ran = run("train", target, prompts, tmp_path / "new", *OPTIONS)
    assert (ran.code, ran.stdout) == (2, "")
    assert "the target has no chat template" in ran.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.work").exists()
