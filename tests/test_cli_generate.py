"""`generate`: text on stdout, one JSON document, ids, files of prompts, refusals in a batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from tiny_text import write_text_drafter, write_text_target

SIZES = ("--max-seq-len", 128, "--max-batch-size", 1, "--max-tokens", 12)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("generate") / "target")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_drafter(tmp_path_factory.mktemp("generate") / "drafter")


def test_json_has_every_answer_in_order_and_a_drafter_changes_none(
    target: Path, drafter: Path, tmp_path: Path
):
    file = tmp_path / "prompts.jsonl"
    file.write_text('[104, 105]\n{"turns": ["hi"]}\n')
    words = ("generate", target, "hi", "--prompts", file, *SIZES, "--json")
    plain, drafted = run(*words).document, run(*words, "--drafter", drafter).document
    assert [one["prompt_token_ids"] for one in plain["completions"]] == [
        [104, 105],
        [104, 105],
        [256, 104, 105, 259, 257],
    ]
    for one, other in zip(plain["completions"], drafted["completions"], strict=True):
        for key in ("text", "token_ids", "finish_reason", "error"):
            assert one[key] == other[key]
        assert one["stats"]["num_drafts"] == 0 < other["stats"]["num_drafts"]
        assert len(one["token_ids"]) == 12
    assert plain["completions"][0] == plain["completions"][1]
    assert (plain["drafter"], drafted["drafter"]) == (None, str(drafter))


def test_one_answer_is_streamed_to_stdout_and_what_it_took_goes_to_stderr(
    target: Path, drafter: Path
):
    words = ("generate", target, "hi", *SIZES, "--drafter", drafter)
    shown, document = run(*words), run(*words, "--json").document
    text = document["completions"][0]["text"]
    assert shown.stdout == (text + "\n").replace("\r\n", "\n")
    assert "acceptance length" in shown.stderr and "12 tokens in" in shown.stderr


def test_many_answers_are_printed_in_order_under_a_bar(target: Path):
    words = ("generate", target, "hi", "there", *SIZES)
    shown, document = run(*words), run(*words, "--json").document
    texts = [one["text"] + "\n" for one in document["completions"]]
    assert shown.stdout == "".join(texts).replace("\r\n", "\n")
    assert "generating" in shown.stderr and "2/2" in shown.stderr
    assert "answer 2 of 2" in shown.stderr


def test_within_a_batch_only_the_bad_request_is_refused_and_the_exit_code_says_so(target: Path):
    words = ("generate", target, "--token-ids", "104 105", "900", *SIZES)
    ran = run(*words, "--json")
    good, bad = ran.document["completions"]
    assert ran.code == 1
    assert (good["finish_reason"], good["error"], len(good["token_ids"])) == ("length", None, 12)
    assert (bad["finish_reason"], bad["token_ids"]) == ("abort", [])
    assert "900" in bad["error"] and "260" in bad["error"]
    assert ran.stderr.count("warning: a request was refused") == 1


@pytest.mark.parametrize(
    "prompt, said",
    [
        ("x" * 117, "117 prompt tokens + max_tokens=12 = 129"),
        ("", "the prompt is empty"),
    ],
)
def test_a_prompt_that_cannot_be_served_ends_with_2(target: Path, prompt: str, said: str):
    for form in ((), ("--json",)):
        ran = run("generate", target, prompt, *SIZES, *form)
        assert (ran.code, ran.stdout) == (2, "")
        assert said in ran.stderr


def test_ids_are_answered_with_ids_where_there_is_no_tokenizer(target: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(target / name)
    words = (*SIZES, "--token-ids", "104 105")
    shown = run("generate", bare, *words)
    ids = run("generate", target, *words, "--json").document["completions"][0]["token_ids"]
    assert [int(word) for word in shown.stdout.split()] == ids
    refused = run("generate", bare, "text", *SIZES)
    assert refused.code == 2
    assert "no tokenizer.json" in refused.stderr


def test_a_seed_fixes_the_draws_and_another_changes_them(target: Path):
    def ids(seed: int) -> list[int]:
        words = ("generate", target, "hi", *SIZES, "--temperature", 1.5, "--seed", seed, "--json")
        return run(*words).document["completions"][0]["token_ids"]

    assert ids(1) == ids(1) != ids(2)


def test_an_answer_goes_past_the_end_token_only_when_told(target: Path, tmp_path: Path):
    def answer(folder: Path, *words: str) -> dict[str, Any]:
        ids = ("--token-ids", "104 105")
        ran = run("generate", folder, *ids, *SIZES, "--json", *words)
        return ran.document["completions"][0]

    first = answer(target)["token_ids"]
    ending = tmp_path / "ending"
    ending.mkdir()
    for file in target.iterdir():
        (ending / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text()) | {"eos_token_id": first[2]}
    (ending / "config.json").write_text(json.dumps(config))
    stopped = answer(ending)
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == first[: first.index(first[2]) + 1]
    onwards = answer(ending, "--ignore-eos")
    assert (onwards["finish_reason"], onwards["token_ids"]) == ("length", first)
