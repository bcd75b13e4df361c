"""`demo` from end to end on a tiny pair, and what it calls a speed."""

from typing import Any

import pytest

import dflash_jax as dj
from command_line import run
from dflash_jax.cli import demo as demo_file
from dflash_jax.cli import speed
from tiny_text import write_text_drafter, write_text_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    parent = tmp_path_factory.mktemp("demo")
    target, drafter = write_text_target(parent / "target"), write_text_drafter(parent / "drafter")
    return ("--target", target, "--drafter", drafter, "--max-seq-len", 128, "--max-tokens", 12)


def test_json_has_the_stable_keys_and_both_texts_are_the_same(pair: tuple[object, ...]):
    ran = run("demo", *pair, "--json")
    document = ran.document
    assert ran.code == 0
    assert document["identical"] is True
    plain, dflash = document["plain"], document["dflash"]
    assert plain["tokens_per_second"] > 0 and dflash["tokens_per_second"] > 0
    assert 1 <= dflash["acceptance_length"] <= 4
    ratio = dflash["tokens_per_second"] / plain["tokens_per_second"]
    assert document["speedup"] == pytest.approx(ratio)
    assert len(document["prompts"]) == len(demo_file.PROMPTS)
    assert {row["num_tokens"] for row in document["prompts"]} == {12}
    assert document["seconds_to_first_token"] > 0


def test_the_answer_goes_to_stdout_and_the_comparison_to_stderr(pair: tuple[object, ...]):
    words = (*pair, "--prompt", "hi")
    shown, document = run("demo", *words), run("demo", *words, "--json").document
    assert shown.code == 0
    assert shown.stdout == (document["prompts"][0]["text"] + "\n").replace("\r\n", "\n")
    assert (document["prompts"][0]["prompt"], document["max_draft_len"]) == ("hi", 3)
    said = " ".join(shown.stderr.split())
    assert "> hi" in said and "tokens per second of decoding, warm" in said
    assert "DFlash is slower" in said or "DFlash decodes" in said
    assert "Explain in a few" in said and "acceptance" in said and "yes" in said


@pytest.mark.parametrize(
    "asked, drafter, used", [(None, "demo", 3), (5, "demo", 5), (None, "x", None)]
)
def test_the_shipped_drafter_proposes_what_was_fastest_unless_asked(
    asked: int | None, drafter: str, used: int | None
):
    assert demo_file.draft_len(asked, drafter) == used


@pytest.mark.parametrize(
    "speedup, said",
    [
        (0.5, "DFlash is slower than plain decoding here: 0.50 × its speed"),
        (3.0, "DFlash decodes 3.00 × as fast as plain decoding here"),
        (None, "the answers are too short to compare speeds"),
    ],
)
def test_a_slowdown_is_printed_as_a_slowdown(speedup: float | None, said: str):
    assert speed.verdict(speedup) == said


class Clocked:
    """An engine that takes 2 s for a prompt and a quarter of a second for each later token."""

    def __init__(self) -> None:
        self.now = 0.0

    def generate(self, prompts: Any, params: dj.SamplingParams) -> list[dj.Completion]:
        self.now += 2.0 + 0.25 * (params.max_tokens - 1)
        return [dj.Completion("", list(range(params.max_tokens)), "length", prompts[0])]


@pytest.mark.parametrize("max_tokens, rate", [(1, None), (2, 4.0), (41, 4.0)])
def test_a_rate_counts_decoding_alone(
    max_tokens: int, rate: float | None, monkeypatch: pytest.MonkeyPatch
):
    engine: Any = Clocked()
    monkeypatch.setattr(speed.time, "perf_counter", lambda: engine.now)
    # The function behind the shape checker, which wants a real engine.
    assert speed.measure(engine, [1], max_tokens).tokens_per_second == rate


def test_medians_and_pooled_lengths_leave_out_what_has_none():
    def one(rate: float | None, lengths: list[int]) -> speed.Measured:
        stats = dj.DecodeStats(acceptance_lengths=lengths)
        return speed.Measured(dj.Completion("", [1], "length", [1], stats=stats), rate)

    runs = [one(10.0, [4, 4]), one(None, []), one(30.0, [1]), one(20.0, [1, 1, 1])]
    assert speed.median_rate(runs) == 20.0
    assert speed.pooled_acceptance_length(runs) == pytest.approx(12 / 6)
    assert speed.median_rate([one(None, [])]) is None
    assert speed.pooled_acceptance_length([one(None, [])]) is None
