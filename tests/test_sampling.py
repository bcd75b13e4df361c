"""Sampling: the distribution is the target's, drafter or not, and a seed is its request's own.

The Markov target has four ids and gives each its own next-id probabilities, so that the exact
joint of two positions is a product of table entries (the oracle). Options as formulas, without an
engine, are in `test_decoding_sampling.py` and `test_decoding_sampling_block.py`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.errors import RequestError
from numpy_pair import NumpyTarget

# p(next | id); the third row is the coin of the fault list.
MARKOV = np.array(
    [
        [0.10, 0.20, 0.30, 0.40],
        [0.25, 0.25, 0.40, 0.10],
        [0.50, 0.30, 0.15, 0.05],
        [0.70, 0.10, 0.10, 0.10],
    ]
)
LIKELY = {i: int(np.argmax(row)) for i, row in enumerate(MARKOV)}
SAMPLES = 600
# Upper 1e-4 quantile of chi-square with 15 degrees of freedom; the seeds are fixed.
CHI_SQUARE_LIMIT = 44.26


def write_drafter(folder: Path) -> Path:
    return tiny.write_drafter(
        folder,
        num_target_layers=1,
        num_hidden_layers=1,
        hidden_size=tiny.ROWS,
        dflash_config={"mask_token_id": tiny.MASK, "target_layer_ids": [0]},
    )


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dj.LLM]:
    folder = tmp_path_factory.mktemp("markov")
    logits = np.full((tiny.VOCAB, tiny.VOCAB), -1e4, np.float32)
    logits[:4, :4] = np.log(MARKOV)
    logits[4:, 0] = 0.0
    target = tiny.write_script_target(folder / "target", logits=logits, num_hidden_layers=1)
    drafter = write_drafter(folder / "drafter")
    # Alone, in company, and a full batch: three row counts in place of seven to compile.
    sizes: dict[str, Any] = {"max_seq_len": 32, "max_batch_size": 64, "row_sizes": (1, 16, 64)}
    return {
        "plain": tiny_engine.start(target, None, **sizes),
        "likely": tiny_engine.start(target, drafter, tiny.perfect(LIKELY), **sizes),
        "unlikely": tiny_engine.start(target, drafter, tiny.never(LIKELY), **sizes),
    }


def chi_square(pairs: np.ndarray, expected: np.ndarray) -> float:
    counts = np.zeros((4, 4))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    expected = expected * len(pairs)
    return float(np.sum((counts - expected) ** 2 / expected))


SLOW_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("plain", "unlikely")]


@pytest.mark.parametrize("mode", ["likely", *SLOW_MODES])
def test_the_joint_of_generated_positions_is_the_targets(markov, mode: str):
    """Faults 9, 13. Positions 1 and 2, then 2 and 3, which lie inside one block."""
    first = {"plain": 0, "likely": 10_000, "unlikely": 20_000}[mode]
    params = [
        dj.SamplingParams(temperature=1.0, max_tokens=4, seed=first + i) for i in range(SAMPLES)
    ]
    done = markov[mode].generate([[2]] * SAMPLES, params)
    ids = np.array([d.token_ids for d in done])
    assert ids.max() < 4
    joint = MARKOV[2][:, None] * MARKOV
    assert chi_square(ids[:, :2], joint) < CHI_SQUARE_LIMIT
    later = joint.sum(axis=0)[:, None] * MARKOV
    assert chi_square(ids[:, 1:3], later) < CHI_SQUARE_LIMIT
    # The same test tells a wrong distribution: this size of sample is enough.
    assert chi_square(ids[:, :2], MARKOV[2][:, None] * MARKOV[2][None, :]) > CHI_SQUARE_LIMIT
    accepted = sum(d.stats.num_accepted_drafts for d in done)
    assert (accepted > SAMPLES) == (mode == "likely")


@pytest.mark.parametrize("temperature", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
def test_temperature_divides_the_logits(markov, temperature: float):
    params = [
        dj.SamplingParams(temperature=temperature, max_tokens=2, seed=i) for i in range(SAMPLES)
    ]
    ids = np.array([d.token_ids for d in markov["likely"].generate([[2]] * SAMPLES, params)])
    scaled = MARKOV ** (1 / temperature)
    scaled /= scaled.sum(axis=1, keepdims=True)
    assert chi_square(ids, scaled[2][:, None] * scaled) < CHI_SQUARE_LIMIT


def test_a_seed_gives_the_same_ids_with_any_drafter_and_in_any_company(markov):
    """Faults 17, 18: seeds 0-9, 16 tokens; then one seed in another slot and alone."""
    params = [dj.SamplingParams(temperature=1.0, max_tokens=16, seed=i) for i in range(10)]
    texts = {
        mode: [d.token_ids for d in llm.generate([[2]] * 10, params)]
        for mode, llm in markov.items()
    }
    assert texts["plain"] == texts["likely"] == texts["unlikely"]
    assert len({tuple(ids) for ids in texts["plain"]}) == 10
    for llm in markov.values():
        assert llm.generate([2], params[7])[0].token_ids == texts["plain"][7]
        again = llm.generate([[2]] * 10, params[::-1])
        assert [d.token_ids for d in again[::-1]] == texts["plain"]


def test_unseeded_requests_differ_from_call_to_call_and_row_to_row(markov):
    params = dj.SamplingParams(temperature=1.0, max_tokens=24)
    texts = [
        tuple(done.token_ids)
        for _ in range(2)
        for done in markov["likely"].generate([[2]] * 3, params)
    ]
    assert len(set(texts)) == 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dj.LLM, dj.LLM, Path]]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "target")
    drafter = tiny.write_drafter(folder / "drafter")
    sizes: dict[str, Any] = {"max_seq_len": 48, "max_batch_size": 4}
    yield (
        tiny_engine.start(target, drafter, **sizes),
        tiny_engine.start(target, None, **sizes),
        target,
    )


def test_seeded_unseeded_and_greedy_rows_of_one_batch_equal_their_solo_runs(pair):
    """Fault 20. Prompts of other lengths; the slots are not those of the solo runs."""
    with_drafter, plain, target = pair
    prompts = [[1, 2, 3], [4, 5], list(range(20)), [9]]
    params = [
        dj.SamplingParams(temperature=1.0, seed=1, max_tokens=20),
        dj.SamplingParams(max_tokens=24),
        dj.SamplingParams(temperature=0.7, seed=3, max_tokens=16),
        dj.SamplingParams(temperature=1.0, max_tokens=22),
    ]
    mixed = [d.token_ids for d in with_drafter.generate(prompts, params)]
    assert mixed[1] == NumpyTarget(target).greedy(prompts[1], 24)
    for i in (0, 2):
        assert mixed[i] == with_drafter.generate(prompts[i], params[i])[0].token_ids
        assert mixed[i] == plain.generate(prompts[i], params[i])[0].token_ids
    assert len(mixed[3]) == 22 and max(mixed[3]) < tiny.VOCAB
    other = dataclasses.replace(params[0], seed=2)
    assert with_drafter.generate(prompts[0], other)[0].token_ids != mixed[0]


def test_a_tiny_temperature_is_greedy_and_a_seed_does_not_touch_greedy_rows(pair):
    with_drafter, _, target = pair
    greedy = NumpyTarget(target).greedy([1, 2, 3], 20)
    for params in (
        dj.SamplingParams(temperature=1e-6, seed=5, max_tokens=20),
        dj.SamplingParams(temperature=0.0, seed=5, max_tokens=20),
    ):
        assert with_drafter.generate([1, 2, 3], params)[0].token_ids == greedy


EXTREMES: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 1.0, "seed": 5},
    "seed": {"temperature": 1.0, "seed": 6},
    "top_p": {"temperature": 1.0, "seed": 5, "top_p": 0.1},
    "top_k": {"temperature": 1.0, "seed": 5, "top_k": 1},
    "min_p": {"temperature": 1.0, "seed": 5, "min_p": 0.9},
    "max_tokens": {"max_tokens": 3},
    "stop_token_ids": {"stop_token_ids": [0, 1, 2, 3]},
    "min_tokens": {"stop_token_ids": [0, 1, 2, 3], "min_tokens": 5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 9.0},
    "logit_bias": {"logit_bias": {1: 100.0}},
}
ELSEWHERE = {"stop", "ignore_eos", "n", "logprobs", "speculate"}


def test_every_parameter_is_shown_to_act_here_or_where_it_needs_more_than_ids():
    """Fault 17; stops need text, the others change what comes with the ids, not the ids."""
    fields = {field.name for field in dataclasses.fields(dj.SamplingParams)}
    assert fields == set(EXTREMES) | ELSEWHERE


@pytest.mark.parametrize("mode", ["plain", "likely"])
def test_every_parameter_changes_the_ids_and_the_same_with_a_drafter_as_without(markov, mode: str):
    """Faults 13, 17, 114, 117."""
    base = {"max_tokens": 24}
    params = [dj.SamplingParams(**(base | one)) for one in [{}, *EXTREMES.values()]]  # type: ignore[arg-type]
    done = [d.token_ids for d in markov[mode].generate([[2]] * len(params), params)]
    plain = [d.token_ids for d in markov["plain"].generate([[2]] * len(params), params)]
    assert done == plain
    texts = dict(zip(["", *EXTREMES], done, strict=True))
    sampled = texts["temperature"]
    for name in ("seed", "top_p", "top_k", "min_p"):
        assert texts[name] != sampled, name
    for name in set(EXTREMES) - {"seed", "top_p", "top_k", "min_p", "min_tokens"}:
        assert texts[name] != texts[""], name
    assert len(texts["stop_token_ids"]) == 1 and len(texts["min_tokens"]) == 6
    assert set(texts["logit_bias"]) == {1} and texts["top_k"] == texts[""]


def test_n_answers_differ_and_come_again_and_the_first_is_that_of_n_1(markov):
    """Fault 21."""
    params = dj.SamplingParams(temperature=1.0, max_tokens=16, seed=7, n=4)
    for llm in markov.values():
        done = llm.generate([2], params)[0]
        texts = [choice.token_ids for choice in done.choices]
        assert len({tuple(ids) for ids in texts}) == 4 and done.token_ids == texts[0]
        again = llm.generate([2], params)[0]
        assert [choice.token_ids for choice in again.choices] == texts
        one = llm.generate([2], dataclasses.replace(params, n=1))[0]
        assert one.token_ids == texts[0]
        greedy = llm.generate([2], dj.SamplingParams(max_tokens=9, n=3))[0]
        assert len({tuple(choice.token_ids) for choice in greedy.choices}) == 1


@pytest.mark.parametrize("mode", ["plain", "likely", "unlikely"])
def test_a_log_probability_comes_with_every_id_and_is_the_targets(markov, mode: str):
    """Fault 113: accepted, corrected and bonus tokens alike; the chain tells what is right."""
    params = dj.SamplingParams(temperature=1.0, max_tokens=20, seed=3, logprobs=2)
    done = markov[mode].generate([2], params)[0]
    assert done.logprobs is not None and len(done.logprobs) == 20
    before = 2
    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(np.log(MARKOV[before][token]), abs=1e-3)
        best = np.argsort(-MARKOV[before])[:2]
        assert [i for i, _ in entry.top] == best.tolist()
        before = token


def test_a_request_that_does_not_speculate_drafts_nothing_and_says_so(markov):
    """Fault 93."""
    llm, params = markov["likely"], dj.SamplingParams(max_tokens=12)
    plain = dataclasses.replace(params, speculate=False)
    for beside in ([], [params]):
        done = llm.generate([[2]] * (1 + len(beside)), [plain, *beside])
        assert done[0].stats.num_drafts == 0 and done[0].stats.speculation == "none"
        for other in done[1:]:
            assert other.stats.num_drafts > 0 and other.stats.speculation == "dflash"
            assert other.token_ids == done[0].token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value):
    with pytest.raises(RequestError, match=name):
        dj.SamplingParams(**{name: value}).check()


@pytest.mark.parametrize("empty", [{"stop": []}, {"stop": ()}, {"logit_bias": {}}], ids=repr)
def test_an_empty_wish_is_no_wish(markov, empty):
    done = markov["plain"].generate([2], dj.SamplingParams(max_tokens=2, **empty))
    assert done[0].finish_reason == "length"


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seeds_from_end_to_end_work(markov, seed: int):
    params = dj.SamplingParams(temperature=1.0, seed=seed, max_tokens=8)
    first = markov["plain"].generate([2], params)[0].token_ids
    assert markov["plain"].generate([2], params)[0].token_ids == first
