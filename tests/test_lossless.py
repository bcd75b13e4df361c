"""Invariant 1: whatever the drafter, the batch or the prompt, the text is the target's own.

The oracle is a greedy loop in NumPy with no cache and no drafter (`numpy_pair.py`); it is held to
the JAX model without a cache once.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.arena.context import ContextRing
from dflash_jax.serving.batch import Batch
from numpy_pair import NumpyContext, NumpyTarget
from tiny_engine import HostDrafter, among

EDGES = [1, 2, 7, 8, 9, 31, 32, 33]


@dataclasses.dataclass
class Pair:
    """A pair on disk, its oracle, and answers that are computed once."""

    target: Path
    drafter: Path
    oracle: NumpyTarget
    host: HostDrafter = dataclasses.field(default_factory=HostDrafter)
    known: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)

    def prompt(self, length: int) -> list[int]:
        rng = np.random.default_rng(length)
        return rng.integers(0, 97, length).tolist()

    def answers(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        return [self._answer(prompt, count) for prompt, count in requests]

    def _answer(self, prompt: list[int], count: int) -> list[int]:
        known = self.known.setdefault(tuple(prompt), [])
        known += self.oracle.greedy([*prompt, *known], count - len(known))
        return known[:count]


@pytest.fixture(scope="module")
def t_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "target")
    return Pair(target, tiny.write_drafter(folder / "drafter"), NumpyTarget(target))


def golden(name: str) -> Pair:
    folder = tiny.GOLDEN / name
    return Pair(folder / "target", folder / "drafter", NumpyTarget(folder / "target"))


@pytest.fixture(scope="module", params=["T", *tiny.PAIRS])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param == "T":
        return request.getfixturevalue("t_pair")
    return golden(request.param)


@pytest.fixture(scope="module")
def batch(pair: Pair) -> Iterator[Batch]:
    """Eight slots; what is proposed changes between requests, the programs stay."""
    built = tiny_engine.engine(
        pair.target, pair.drafter, pair.host, row_sizes=(1, 4, 8), max_seq_len=64, max_batch_size=8
    )
    yield Batch(built)


def rules(texts: list[list[int]]) -> dict[str, Callable | None]:
    return {
        "perfect": among(texts, wrong=lambda length: None),
        "own": None,
        "random": tiny_engine.random_drafts(0),
        "always wrong": among(texts, wrong=lambda length: 0),
        "wrong at every slot in turn": among(texts, wrong=lambda length: length % 8),
    }


def test_the_oracle_is_the_model_without_a_cache(t_pair: Pair):
    prompt = t_pair.prompt(9)
    assert t_pair.oracle.greedy(prompt, 24) == tiny.reference(
        dj.load_target(t_pair.target), prompt, 24
    )


@pytest.mark.parametrize("count", [1, 3, 12])
def test_any_drafter_in_a_ragged_batch_leaves_the_text_alone(pair: Pair, batch: Batch, count: int):
    """Fault 1. Twelve requests share eight slots and end one by one."""
    lengths = [*EDGES, 5, 20, 3, 12][-count:] if count < 12 else [*EDGES, 5, 20, 3, 12]
    requests = [(pair.prompt(n), 31 - 2 * i) for i, n in enumerate(lengths)]
    answers = pair.answers(requests)
    texts = [prompt + answer for (prompt, _), answer in zip(requests, answers, strict=True)]
    for name, rule in rules(texts).items():
        pair.host.rule = rule
        rows = tiny_engine.run(batch, *requests)
        assert [row.token_ids for row in rows] == answers, name
        accepted = sum(row.stats.num_accepted_drafts for row in rows)
        if name == "always wrong":
            assert accepted == 0
        if name == "perfect":
            width = batch.engine.config.verify_width
            assert max(row.stats.acceptance_lengths[0] for row in rows) == width


@pytest.fixture(scope="module")
def narrow(t_pair: Pair) -> dict[int, Batch]:
    """One slot and blocks of every width below the trained one."""
    return {
        k: Batch(
            tiny_engine.engine(
                t_pair.target,
                t_pair.drafter,
                t_pair.host,
                max_seq_len=76,
                max_batch_size=1,
                max_num_tokens=76,
                max_draft_len=k,
            )
        )
        for k in (1, 2, 3)
    }


@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_width_up_to_the_trained_one_leaves_the_text_alone(t_pair, narrow, width: int):
    """Fault 1: prompt lengths around the buckets, 40 tokens, P in {1, 2, 3}."""
    requests = [(t_pair.prompt(n), 40) for n in EDGES]
    answers = t_pair.answers(requests)
    texts = [prompt + answer for (prompt, _), answer in zip(requests, answers, strict=True)]
    for name, rule in rules(texts).items():
        t_pair.host.rule = rule
        rows = tiny_engine.run(narrow[width], *requests)
        assert [row.token_ids for row in rows] == answers, name
        assert all(set(row.stats.drafts_per_round) <= {width} for row in rows)


@pytest.mark.parametrize(("name", "width"), [("llama-tiny", 2), ("qwen3-tiny", 5)])
def test_narrow_blocks_of_the_golden_pairs_leave_the_text_alone(name: str, width: int):
    """Fault 1: blocks of fewer drafts than the 3 and 7 that these drafters were made for."""
    pair = golden(name)
    # One chunk length: one prefill program and one round are all that compiles.
    options: dict[str, Any] = {
        "max_seq_len": 48,
        "max_batch_size": 1,
        "max_num_tokens": 32,
        "max_draft_len": width,
    }
    batch = Batch(tiny_engine.engine(pair.target, pair.drafter, pair.host, **options))
    requests = [(pair.prompt(n), 15) for n in (1, 9, 33)]
    answers = pair.answers(requests)
    texts = [prompt + answer for (prompt, _), answer in zip(requests, answers, strict=True)]
    for rule_name, pair.host.rule in rules(texts).items():
        rows = tiny_engine.run(batch, *requests)
        assert [row.token_ids for row in rows] == answers, rule_name
        assert all(set(row.stats.drafts_per_round) <= {width} for row in rows)
        if rule_name == "perfect":
            assert all(width in row.stats.accepted_drafts_per_round for row in rows)


def test_a_slot_answers_as_a_fresh_engine_whatever_it_held_before(t_pair, narrow):
    """Fault 57: 30 + 20 tokens, then 3 + 20, then 30 + 20 again, in the one slot there is."""
    long, short = (t_pair.prompt(30), 20), (t_pair.prompt(3), 20)
    t_pair.host.rule = None
    rows = tiny_engine.run(narrow[3], long, short, long)
    assert [row.token_ids for row in rows] == t_pair.answers([long, short, long])
    assert rows[0].stats == rows[2].stats


def test_history_is_prompt_and_answer_after_every_round_at_every_width(t_pair, narrow):
    """Fault 3: a perfect drafter, the budget nearly spent; arenas count what was committed."""
    requests = [(t_pair.prompt(5), count) for count in range(1, 10)]
    text = t_pair.prompt(5) + t_pair.oracle.greedy(t_pair.prompt(5), 16)
    t_pair.host.rule = among([text], wrong=lambda length: None)
    for width, batch in narrow.items():
        for prompt, count in requests:
            row = tiny_engine.request(prompt, dj.SamplingParams(max_tokens=count))
            tiny_engine.one_at_a_time(batch).submit(row)
            while row.finish_reason is None:
                batch.step()
                assert prompt + row.token_ids == text[: len(prompt + row.token_ids)], width
                if row.finish_reason is None:
                    state = batch.engine.state
                    history = len(prompt + row.token_ids) - 1
                    assert int(state.kv.lengths[0]) == history
                    assert state.context is not None and int(state.context.lengths[0]) == history
            assert len(row.token_ids) == count


def test_every_prompt_length_that_can_be_served_is_answered_to_the_last_place(t_pair: Pair):
    """Prompt lengths 1 … served length - 1, each filling what is left; 39 requests, 4 slots."""
    host = HostDrafter()
    batch = Batch(
        tiny_engine.engine(
            t_pair.target, t_pair.drafter, host, row_sizes=(4,), max_seq_len=40, max_batch_size=4
        )
    )
    requests = [(t_pair.prompt(n), 40 - n) for n in range(1, 40)]
    answers = t_pair.answers(requests)
    texts = [prompt + answer for (prompt, _), answer in zip(requests, answers, strict=True)]
    host.rule = among(texts, wrong=lambda length: length % 5)
    rows = tiny_engine.run(batch, *requests)
    assert [row.token_ids for row in rows] == answers


def test_chunks_of_a_prompt_are_one_prompt_to_target_and_drafter(t_pair: Pair):
    """Faults 44, 50: chunks of 8; no empty one, and all context rows as from one shot."""
    engine = tiny_engine.engine(
        t_pair.target, t_pair.drafter, max_seq_len=48, max_batch_size=1, max_num_tokens=8
    )
    context = NumpyContext(t_pair.drafter)
    for length in (1, 7, 8, 9, 16, 17, 20):
        prompt = t_pair.prompt(length)
        first = tiny_engine.prefill(engine, 0, prompt)
        assert [first] == t_pair.oracle.greedy(prompt, 1)
        arena = engine.state.context
        assert arena is not None and arena.lengths.tolist() == [length]
        wanted = context.rows(t_pair.oracle.forward(prompt).outputs)
        for layer, (keys, values) in zip(arena.layers, wanted, strict=True):
            np.testing.assert_allclose(layer.keys[0, :, :length], keys, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(layer.values[0, :, :length], values, rtol=1e-5, atol=1e-5)
    request = (t_pair.prompt(20), 24)
    assert tiny_engine.run(Batch(engine), request)[0].token_ids == t_pair.answers([request])[0]


def test_drafts_of_a_request_do_not_depend_on_its_batch_mates(t_pair: Pair, tmp_path: Path):
    """Fault 43: blocks of 16, batches of 1, 3 (bucket 4) and 5 (bucket 8)."""
    drafter = tiny.write_drafter(tmp_path / "wide", block_size=16)
    batch = Batch(
        tiny_engine.engine(
            t_pair.target, drafter, row_sizes=(1, 4, 8), max_seq_len=32, max_batch_size=8
        )
    )
    drafts = []
    for mates in (0, 2, 4):
        first = tiny_engine.request(t_pair.prompt(9), dj.SamplingParams(max_tokens=12))
        beside = dj.SamplingParams(max_tokens=16)
        others = [tiny_engine.request(t_pair.prompt(3 + 4 * i), beside) for i in range(mates)]
        for row in (first, *others):
            tiny_engine.one_at_a_time(batch).submit(row)
        seen = []
        while first.finish_reason is None:
            slot, rounds = first.slot, first.stats.num_rounds
            batch.step()
            if first.stats.num_rounds > rounds and slot is not None:
                seen.append(batch.last_rounds[slot].drafts)
        while any(batch.slots):
            batch.step()
        drafts.append(seen)
    assert all(len(one) == 15 for one in drafts[0])
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_rejected_tail_is_given_back_where_windows_have_wrapped(tmp_path: Path):
    """Fault 4: window 8, prompt 6, 24 tokens; a sliding and a full layer, and a drafter's ring."""
    sliding: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
    windows = {**sliding, "layer_types": ["sliding_attention", "full_attention"]}
    ring = {**sliding, "layer_types": ["sliding_attention"] * 2}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}
    taps = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 1]}
    target = tiny.write_target(tmp_path / "target", **kind, **windows)
    drafter = tiny.write_drafter(
        tmp_path / "drafter", num_target_layers=2, dflash_config=taps, **ring
    )
    ids = np.random.default_rng(3).integers(0, tiny.VOCAB, 6).tolist()
    answer = tiny.reference(dj.load_target(target), ids, 24 + 4)
    host = HostDrafter()
    options: dict[str, Any] = {"max_seq_len": 48, "max_batch_size": 1, "max_num_tokens": 8}
    engine = tiny_engine.engine(target, drafter, host, read_piece=5, **options)
    assert type(engine.state.context) is ContextRing
    batch = Batch(engine, reuse=False)
    accepted = []
    for wrong in (lambda length: 0, lambda length: length % 4):
        host.rule = among([ids + answer], wrong=wrong)
        row = tiny_engine.run(batch, (ids, 24))[0]
        assert row.token_ids == answer[:24]
        accepted.append(set(row.stats.accepted_drafts_per_round))
    assert accepted[0] == {0} and accepted[1] == {1, 2, 3}
