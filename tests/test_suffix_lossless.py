"""Drafting from the text itself leaves the text alone: `speculation="suffix"` against its oracles.

Greedy text is held to the loop in NumPy (`numpy_pair.py`) or to the script itself, sampled text to
an engine without speculation; texts repeat themselves, so that drafts are accepted and rejected.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.decoding import programs
from dflash_jax.decoding.report import NOT_RUN
from dflash_jax.serving import rounds
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from numpy_pair import NumpyTarget
from tiny_engine import Watched

SLOTS, SERVED, K = 4, 64, 7
# 10 → 11 → … → 21 → 10: a text without a repeated end until it has gone round once.
RING = list(range(10, 22))
TABLE = {token: RING[(i + 1) % len(RING)] for i, token in enumerate(RING)}


def going_round(start: int, count: int) -> list[int]:
    return [RING[(start - 10 + i) % len(RING)] for i in range(count)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose greedy text repeats itself now and then (most seeds' does not)."""
    folder = tmp_path_factory.mktemp("random") / "target"
    return tiny.write_target(folder, seed=6, num_hidden_layers=2)


@pytest.fixture(scope="module")
def oracle(target: Path) -> NumpyTarget:
    return NumpyTarget(target)


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    return tiny_engine.engine(
        target,
        None,
        speculation="suffix",
        row_sizes=(SLOTS,),
        max_seq_len=SERVED,
        max_batch_size=SLOTS,
    )


@pytest.fixture(scope="module")
def ring_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ring") / "target"
    return tiny.write_script_target(folder, TABLE, num_hidden_layers=1, eos_token_id=90)


@pytest.fixture(scope="module")
def served(ring_target: Path) -> dj.LLM:
    """The one engine here that starts as a user's does: compiled ahead and warmed up."""
    return dj.LLM(ring_target, speculation="suffix", max_seq_len=SERVED, max_batch_size=2)


def repeating(length: int) -> list[int]:
    """A random piece again and again, the last time cut off."""
    rng = np.random.default_rng(length)
    piece = rng.integers(0, tiny.VOCAB, 1 + length // 3).tolist()
    return (piece * 4)[:length]


def test_greedy_text_of_a_ragged_batch_is_the_targets(engine: Engine, oracle: NumpyTarget):
    """Fault 1. Twelve requests share four slots, end one by one, with and without drafts."""
    lengths = (1, 2, 7, 8, 9, 31, 32, 33, 5, 20, 3, 12)
    requests = [(repeating(n), 31 - 2 * i) for i, n in enumerate(lengths)]
    rows = tiny_engine.run(Batch(Watched(engine)), *requests)
    for row, (prompt, count) in zip(rows, requests, strict=True):
        assert row.token_ids == oracle.greedy(prompt, count), len(prompt)
        assert row.suffixes is None
    drafted = {n for row in rows for n in row.stats.drafts_per_round}
    accepted = {n for row in rows for n in row.stats.accepted_drafts_per_round}
    assert drafted == {0, K}
    assert {0, K} < accepted


def test_one_draft_a_round_and_prompts_in_chunks_leave_the_text_alone(target, oracle):
    """Fault 1 at K = 1; chunks of 8, the one slot used again and again."""
    small = tiny_engine.engine(
        target,
        None,
        speculation="suffix",
        max_draft_len=1,
        max_seq_len=SERVED,
        max_batch_size=1,
        max_num_tokens=8,
    )
    requests = [(repeating(n), 24) for n in (2, 31, 8, 9)]
    rows = tiny_engine.run(Batch(small), *requests)
    assert [row.token_ids for row in rows] == [oracle.greedy(*request) for request in requests]
    assert {n for row in rows for n in row.stats.accepted_drafts_per_round} == {0, 1}


def test_all_rows_of_the_arena_are_those_of_the_committed_tokens(engine, oracle):
    """Invariant 2, the target's half: they equal the rows of one pass over the whole text."""
    requests = [(repeating(n), 24) for n in (2, 31, 33, 5)]
    rows = tiny_engine.run(Batch(engine), *requests)
    assert all(row.stats.num_accepted_drafts > 0 for row in rows)
    assert engine.state.context is None
    for slot, row in enumerate(rows):
        committed = [*row.prompt, *row.token_ids][:-1]
        done = oracle.forward(committed)
        assert int(engine.state.kv.lengths[slot]) >= len(committed)
        for layer, keys, values in zip(engine.state.kv.layers, done.keys, done.values, strict=True):
            for ours, theirs in ((layer.keys, keys), (layer.values, values)):
                scale = max(1.0, float(np.max(np.abs(theirs))))
                ours = ours[slot, :, : len(committed)]
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)


def test_drafts_for_dead_rows_are_dropped_and_rows_without_any_verify_their_anchor(engine, oracle):
    """Fault 37 and invariant 8: filler is id 0, and it is no proposal."""
    prompts = {slot: repeating(9 + slot) for slot in range(SLOTS)}
    for slot, prompt in prompts.items():
        tiny_engine.prefill(engine, slot, prompt)
    texts = {slot: oracle.greedy(prompt, 1 + K + 1) for slot, prompt in prompts.items()}
    drafts = {0: texts[0][1 : 1 + K], 1: texts[1][1:4], 2: texts[2][1 : 1 + K]}
    report = tiny_engine.play(Watched(engine), [False, True, True, True], drafts=drafts)
    assert report.num_drafts.tolist() == [0, 3, K, 0]
    assert report.num_accepted_drafts.tolist() == [NOT_RUN, 3, K, 0]
    for slot, count in ((1, 4), (2, K + 1), (3, 1)):
        assert report.chosen[slot, :count].tolist() == texts[slot][1 : 1 + count]


def test_a_loop_commits_whole_blocks(served: dj.LLM):
    """Once round alone, the second match of two ids tells what follows, then 8 ids a round."""
    done = served.generate([[10]], dj.SamplingParams(max_tokens=40))[0]
    assert done.token_ids == going_round(11, 40)
    alone = len(RING)
    assert done.stats.acceptance_lengths == [1] * alone + [8, 8, 8, 3]
    assert done.stats.drafts_per_round == [0] * alone + [K] * 4
    again = served.generate([going_round(10, 20)], dj.SamplingParams(max_tokens=33))[0]
    assert again.token_ids == going_round(18, 33)
    assert again.stats.acceptance_length == 8
    last = served.last_round(0)
    assert last is not None and last.num_accepted_drafts == K
    assert [*last.drafts, last.chosen[K]] == last.chosen == again.token_ids[-8:]


def test_a_round_in_which_nobody_proposes_is_plain_decoding(served: dj.LLM, monkeypatch):
    called: list[str] = []
    call = served._engine._pass
    monkeypatch.setattr(
        served._engine, "_pass", lambda name, *rest: called.append(name) or call(name, *rest)
    )
    served.generate([[10]], dj.SamplingParams(max_tokens=10))
    assert set(called) == {"prefill-32", "plain-1"}
    called.clear()
    fresh, looping = served.generate([[10], going_round(10, 20)], dj.SamplingParams(max_tokens=10))
    assert fresh.token_ids == going_round(11, 10) and set(fresh.stats.drafts_per_round) == {0}
    assert looping.token_ids == going_round(18, 10) and K in looping.stats.drafts_per_round
    assert {"round-2-greedy", "plain-1"} <= set(called)


def test_what_was_proposed_is_counted_and_neither_anchor_nor_filler(served: dj.LLM, monkeypatch):
    """Faults 69, 70: nine rounds of three drafts and one of one, in blocks of 8."""
    counts = [3] * 9 + [1]
    wrong = iter([5] * count for count in counts)
    monkeypatch.setattr(rounds, "host_drafts", lambda rows, width: {rows[0].slot: next(wrong)})
    before = served.load()
    done = served.generate([[10]], dj.SamplingParams(max_tokens=11))[0]
    after, stats = served.load(), done.stats
    assert done.token_ids == going_round(11, 11)
    assert (stats.drafts_per_round, stats.num_drafts, stats.num_rounds) == (counts, 28, 10)
    assert stats.accepted_drafts_per_round == [0] * 10
    names = ("drafts", "rounds", "rounds_drafting", "accepted")
    assert [getattr(after, n) - getattr(before, n) for n in names] == [28, 10, 10, 0]
    assert after.accepted_at == before.accepted_at


@pytest.mark.parametrize("index", range(len(RING)))
def test_an_end_id_ends_the_answer_at_every_place_of_a_block(served: dj.LLM, index: int):
    """Fault 23."""
    text = going_round(18, 2 * len(RING))
    params = dj.SamplingParams(max_tokens=40, stop_token_ids=[text[index]])
    done = served.generate([going_round(10, 20)], params)[0]
    assert (done.token_ids, done.finish_reason) == (text[: index + 1], "stop")
    assert 1 + sum(done.stats.acceptance_lengths) == index + 1


@pytest.mark.parametrize("count", [1, 2, 8, 9, 10, 44])
def test_exactly_as_many_ids_as_asked_for_come_back(served: dj.LLM, count: int):
    """Fault 25; 20 + 44 fill the served length."""
    done = served.generate([going_round(10, 20)], dj.SamplingParams(max_tokens=count))[0]
    assert (done.token_ids, done.finish_reason) == (going_round(18, count), "length")


def test_nothing_compiles_in_service_and_every_program_aliases_its_arena(served: dj.LLM):
    """Invariants 6 and 7, with all that rows of one batch can have."""
    kinds = [f"{rows}-{kind}" for rows in (1, 2) for kind in ("greedy", "general")]
    expected = {"open", "copy", "clean", "prefill-32", "prefill-64", "plain-1", "plain-2"}
    assert set(served.programs) == expected | {f"round-{k}" for k in kinds}
    assert served.arenas.context is None
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(served.arenas.kv.layers))
    for name, program in served.programs.items():
        memory: Any = program.memory_analysis()
        assert memory.alias_size_in_bytes >= size, name
    before = served.compiles_in_service
    params = [
        dj.SamplingParams(max_tokens=9),
        dj.SamplingParams(max_tokens=30, temperature=0.5, seed=1),
        dj.SamplingParams(max_tokens=20, stop_token_ids=[15]),
    ]
    served.generate([going_round(10, 20), going_round(12, 30), [10]], params)
    assert served.compiles_in_service == before


def test_a_default_configuration_has_at_most_24_programs(ring_target: Path):
    """Invariant 7: both kinds of round of every batch size and the prefills are just as many."""
    config = tiny_engine.resolved(ring_target, None, speculation="suffix")
    assert (config.max_batch_size, config.max_draft_len, config.block_width) == (16, K, 0)
    model = programs.split_model(dj.load_target(ring_target))
    names = [p.name for p in programs.list_programs(config, model, programs.split_model(None))]
    assert len(names) == len(set(names)) <= 24
    assert {"round-16-greedy", "round-16-general", "plain-16"} <= set(names)


class Broken(BaseException):
    """Stands for anything that ends a call in the middle: Ctrl-C is one."""


def test_what_is_left_early_leaves_no_automaton_behind_and_what_is_cut_short_goes_on(
    served: dj.LLM, monkeypatch
):
    params = dj.SamplingParams(max_tokens=20)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise Broken

    rows = [served.submit(going_round(10, 20), params)[0] for _ in range(3)]
    while not rows[1].generated:
        served.step()
    assert [row.suffixes is not None for row in rows] == [True, True, False]
    served.cancel(rows[0])
    with monkeypatch.context() as patch:
        patch.setattr(served._engine, "start_round", broken)
        with pytest.raises(Broken):
            served.step()
    assert rows[0].suffixes is None
    while served.busy:
        served.step()
    assert [row.token_ids == going_round(18, 20) for row in rows] == [False, True, True]
    assert [row.suffixes for row in rows] == [None] * 3
    assert served.generate([going_round(10, 20)], params)[0].token_ids == going_round(18, 20)


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> tuple[dj.LLM, dj.LLM]:
    """Four ids that follow each other by chance: without speculation, and with it."""
    rng = np.random.default_rng(3)
    logits = np.full((tiny.VOCAB, tiny.VOCAB), -1e4, np.float32)
    logits[:, :4] = rng.normal(0, 2, (tiny.VOCAB, 4))
    target = tiny.write_script_target(
        tmp_path_factory.mktemp("markov") / "target", logits=logits, num_hidden_layers=1
    )
    sizes: dict[str, Any] = {"max_seq_len": 48, "max_batch_size": 16}
    return (
        tiny_engine.start(target, None, **sizes),
        tiny_engine.start(target, None, speculation="suffix", **sizes),
    )


def test_a_seed_gives_the_ids_that_it_gives_without_speculation(markov):
    """Fault 18. Drafts follow the text and never the noise, so equal ids are equal chances.

    Rows with and without a temperature in one batch, in other slots the second time.
    """
    plain, suffix = markov
    prompts: Sequence[Any] = [[i % 4, 2] for i in range(48)]
    params = [
        dj.SamplingParams(temperature=(0.0, 0.6, 1.0, 1.7)[i % 4], max_tokens=40, seed=i)
        for i in range(48)
    ]
    expected = [done.token_ids for done in plain.generate(prompts, params)]
    found = suffix.generate(prompts, params)
    assert [done.token_ids for done in found] == expected
    back = suffix.generate(prompts[::-1], params[::-1])
    assert [done.token_ids for done in back[::-1]] == expected
    sampled = [d for d, p in zip(found, params, strict=True) if p.temperature > 0]
    assert len({tuple(d.token_ids) for d in sampled}) > 24
    rejected = sum(d.stats.num_drafts - d.stats.num_accepted_drafts for d in sampled)
    assert rejected > 100 and sum(d.stats.num_accepted_drafts for d in sampled) > 100
