"""Invariants 2, 4 and 8: after every round the arenas hold what the committed tokens give.

Three oracles: the float64 rows of `numpy_pair.py`; a bit-for-bit comparison of everything that a
call had no business to write (`tiny_engine.Watched`); and poison in all rows that do not count.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.arena.rows import ArenaRows
from dflash_jax.decoding.state import EngineState
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from numpy_pair import NumpyContext, NumpyTarget
from tiny_engine import HostDrafter, Watched, among

POISON = 1e4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return tiny.write_target(folder / "target"), tiny.write_drafter(folder / "drafter")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A scripted target of one layer and blocks of 8."""
    folder = tmp_path_factory.mktemp("script")
    target = tiny.write_script_target(folder / "target", num_hidden_layers=1)
    drafter = tiny.write_drafter(
        folder / "drafter",
        block_size=8,
        num_target_layers=1,
        num_hidden_layers=1,
        hidden_size=tiny.ROWS,
        dflash_config={"mask_token_id": tiny.MASK, "target_layer_ids": [0]},
    )
    return target, drafter


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 97, length).tolist()


def assert_rows(arena: Any, slot: int, wanted: Any, length: int) -> None:
    assert int(arena.lengths[slot]) == length
    for layer, (keys, values) in zip(arena.layers, wanted, strict=True):
        for ours, theirs in ((layer.keys, keys), (layer.values, values)):
            # float32 against float64: 1e-5 of the largest entry.
            scale = max(1.0, float(np.max(np.abs(theirs))))
            np.testing.assert_allclose(ours[slot, :, :length], theirs, rtol=0, atol=1e-5 * scale)


class Exact:
    """After every call: the rows of every decoding slot are those of its committed tokens."""

    def __init__(self, target: Path, drafter: Path | None):
        self.target = NumpyTarget(target)
        self.context = None if drafter is None else NumpyContext(drafter)
        self.batch: Batch | None = None
        self.rounds = 0

    def __call__(self, state: EngineState) -> None:
        """Called before the batch has taken in the report: the ids of this round are not known.

        The first lengths of a text's rows do not change later, so each is checked one call late.
        """
        assert self.batch is not None
        for slot, row in enumerate(self.batch.slots):
            if row is None or not row.token_ids:
                continue
            committed = [*row.prompt, *row.token_ids][:-1]
            done = self.target.forward(committed)
            kv = _first(state.kv, len(committed))
            assert_rows(kv, slot, list(zip(done.keys, done.values, strict=True)), len(committed))
            if self.context is not None:
                context = _first(state.context, len(committed))
                assert_rows(context, slot, self.context.rows(done.outputs), len(committed))
            self.rounds += 1


def _first(arena: Any, length: int) -> Any:
    """The arena as it was when its rows were `length` long (rows are only ever appended)."""
    return arena._replace(lengths=np.minimum(arena.lengths, length))


@pytest.mark.parametrize("name", ["T", *tiny.PAIRS])
def test_all_arena_rows_are_a_fresh_prefill_of_the_committed_tokens_after_every_round(
    name: str, folders: tuple[Path, Path]
):
    """Fault 47. Every acceptance length occurs; requests share slots and end one by one."""
    if name != "T":
        folders = tiny.GOLDEN / name / "target", tiny.GOLDEN / name / "drafter"
    oracle, host = NumpyTarget(folders[0]), HostDrafter()
    requests = [(prompt(n), count) for n, count in ((5, 25), (1, 12), (33, 9), (12, 16))]
    texts = [ids + oracle.greedy(ids, count + 8) for ids, count in requests]
    engine = tiny_engine.engine(
        folders[0], folders[1], host, row_sizes=(3,), max_seq_len=48, max_batch_size=3
    )
    turn, width = itertools.count(), engine.config.verify_width
    host.rule = among(texts, wrong=lambda length: next(turn) % width)
    exact = Exact(*folders)
    batch = exact.batch = Batch(Watched(engine, exact))
    rows = tiny_engine.run(batch, *requests)
    assert [row.prompt + row.token_ids for row in rows] == [text[:-8] for text in texts]
    accepted = {n for row in rows for n in row.stats.accepted_drafts_per_round}
    assert accepted == set(range(width))
    assert exact.rounds > 20


def poisoned(state: EngineState, active: np.ndarray) -> EngineState:
    """The state with 1e4 in every row that does not count and in all of an idle slot."""

    def fill(arena: Any) -> Any:
        lengths = np.where(active, arena.lengths, 0)
        dead = np.arange(arena.layers[0].keys.shape[2]) >= lengths[:, None]
        layers = jax.tree.map(
            lambda x: np.where(dead[:, None, :, None], np.float32(POISON), x), arena.layers
        )
        return arena._replace(layers=layers)

    return state._replace(kv=fill(state.kv), context=fill(state.context))


def device(state: EngineState) -> EngineState:
    return jax.tree.map(jnp.asarray, state)


def kept_rows(state: EngineState, slot: int) -> list[np.ndarray]:
    arenas: tuple[Any, ...] = (state.kv, state.context)
    return [
        np.asarray(array)[slot, :, : int(arena.lengths[slot])]
        for arena in arenas
        for array in jax.tree.leaves(arena.layers)
    ]


@pytest.mark.parametrize("read_piece", [None, 16])
def test_poison_in_rejected_and_idle_rows_changes_no_bit(folders, read_piece: int | None):
    """Fault 5. Rejections at every slot of a block, then a round and a prefill over poison."""
    host, oracle = HostDrafter(), NumpyTarget(folders[0])
    texts = [prompt(n) + oracle.greedy(prompt(n), 30) for n in (5, 9)]
    engine = tiny_engine.engine(
        folders[0],
        folders[1],
        host,
        row_sizes=(4,),
        read_piece=read_piece,
        max_seq_len=48,
        max_batch_size=4,
    )
    # Slot 0 was used before and is idle now.
    for slot, ids in ((0, prompt(20)), (1, prompt(5)), (3, prompt(9))):
        tiny_engine.prefill(engine, slot, ids)
    active = [False, True, False, True]
    for wrong in range(3):
        host.rule = among(texts, wrong=lambda length, wrong=wrong: wrong)
        clean = tiny_engine.snapshot(engine.state)
        engine.state = device(poisoned(clean, np.array(active)))
        over_poison = tiny_engine.play(engine, active)
        poisoned_state = tiny_engine.snapshot(engine.state)
        engine.state = device(clean)
        plain = tiny_engine.play(engine, active)
        for ours, theirs in zip(over_poison[:4], plain[:4], strict=True):
            np.testing.assert_array_equal(ours[[1, 3]], theirs[[1, 3]])
        assert plain.num_accepted_drafts[[1, 3]].tolist() == [wrong, wrong]
        assert np.all(plain.num_drafts[[0, 2]] == 0)
        new = tiny_engine.snapshot(engine.state)
        for slot in (1, 3):
            for ours, theirs in zip(
                kept_rows(poisoned_state, slot), kept_rows(new, slot), strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)
    _check_logits(engine, tiny_engine.snapshot(engine.state), folders[0], read_piece)


def _check_logits(engine: Engine, state: EngineState, target: Path, piece: int | None) -> None:
    """One more token over every row: the logits themselves, to the last bit."""
    model = dj.load_target(target)

    @jax.jit
    def logits(kv: Any) -> jax.Array:
        ids = jnp.full((4, 1), 7, jnp.int32)
        return model.logits(model.run(ids, kv.lengths, ArenaRows(kv.layers, None, piece), ())[0])

    bad = poisoned(state, np.array([True] * 4))
    assert float(jnp.max(bad.kv.layers[0].keys)) == POISON
    np.testing.assert_array_equal(logits(device(bad).kv), logits(device(state).kv))
    again = tiny_engine.prefill(engine, 0, prompt(7))
    fresh = tiny_engine.snapshot(engine.state)
    engine.state = device(bad)
    assert tiny_engine.prefill(engine, 0, prompt(7)) == again
    for ours, theirs in zip(
        kept_rows(tiny_engine.snapshot(engine.state), 0), kept_rows(fresh, 0), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_idle_lengths_never_grow_while_the_others_gain_eight_a_step(scripted):
    """Five slots of which three decode: [40, 300, 7, 0, 0], +8 a step with a perfect drafter."""
    engine = tiny_engine.engine(
        scripted[0], scripted[1], tiny.perfect(), row_sizes=(5,), max_seq_len=400, max_batch_size=5
    )
    for slot, length in enumerate((40, 300, 7)):
        tiny_engine.prefill(engine, slot, prompt(length))
    lengths = [40, 300, 7, 0, 0]
    active = [True, True, True, False, False]
    watched = Watched(engine)
    for step in range(1, 9):
        tiny_engine.play(watched, active)
        expected = [n + 8 * step if on else 0 for n, on in zip(lengths, active, strict=True)]
        assert engine.state.kv.lengths.tolist() == expected
        assert engine.state.context is not None
        assert engine.state.context.lengths.tolist() == expected


def test_first_and_last_row_are_unharmed_by_rounds_of_the_rows_between(scripted):
    """Fault 58: all arena rows marked, slots 0 and 4 idle, none of their bits may change."""
    engine = tiny_engine.engine(
        scripted[0], scripted[1], tiny.perfect(), row_sizes=(5,), max_seq_len=64, max_batch_size=5
    )
    # Marks everywhere, lengths of idle slots included: no length is a licence to write.
    marked = tiny_engine.snapshot(engine.state)
    kv = marked.kv._replace(lengths=np.full((5,), 9, np.int32))
    assert marked.context is not None
    context = marked.context._replace(lengths=np.full((5,), 9, np.int32))
    filled = jax.tree.map(lambda x: x + np.float32(7) if x.ndim == 4 else x, (kv, context))
    tokens = marked.tokens._replace(
        remaining=np.full((5,), 99, np.int32), drafting=np.ones((5,), bool)
    )
    engine.state = device(EngineState(filled[0], filled[1], tokens))
    watched = Watched(engine)
    for active in ([False, True, True, True, False], [False, False, True, False, False]):
        tiny_engine.play(watched, active)
    tiny_engine.prefill(watched, 2, prompt(6))
    for arena in (engine.state.kv, engine.state.context):
        assert arena is not None
        assert arena.lengths.tolist()[0] == arena.lengths.tolist()[4] == 9
        for array in jax.tree.leaves(arena.layers):
            assert np.all(np.asarray(array)[[0, 4]] == 7)


def test_a_block_may_start_at_every_place_before_the_served_end(scripted):
    """Faults 33, 35, 36: limit 32, blocks of 8, all slots at once, each filling the limit.

    `Watched` compares every other row bit for bit: nothing is clamped back over earlier rows.
    """
    engine = tiny_engine.engine(
        scripted[0], scripted[1], tiny.perfect(), row_sizes=(8,), max_seq_len=32, max_batch_size=8
    )
    assert engine.state.kv.layers[0].keys.shape[2] == 32 + 8
    batch = Batch(Watched(engine))
    requests = [(prompt(n), 32 - n) for n in range(16, 32)]
    rows = tiny_engine.run(batch, *requests)
    for row, (ids, count) in zip(rows, requests, strict=True):
        assert row.token_ids == tiny.script(ids[-1], count)
        assert len(row.prompt) + len(row.token_ids) == 32


def test_the_engine_watched_here_is_caught_when_it_writes_too_much(scripted):
    """The watcher itself: one row more, one length more, one bit elsewhere are all noticed."""
    engine = tiny_engine.engine(
        scripted[0], scripted[1], tiny.perfect(), row_sizes=(2,), max_seq_len=32, max_batch_size=2
    )
    tiny_engine.prefill(engine, 0, prompt(4))
    honest = engine.start_round
    watched = Watched(engine)

    @dataclasses.dataclass
    class Meddling:
        change: Any

        def start_round(self, active: Any, **options: Any) -> Any:
            packed = honest(active, **options)
            engine.state = device(self.change(tiny_engine.snapshot(engine.state)))
            return packed

    def one_bit(state: EngineState) -> EngineState:
        state.kv.layers[0].keys[1, 0, 30, 0] += 1
        return state

    def one_length(state: EngineState) -> EngineState:
        state.kv.lengths[1] += 1
        return state

    for change in (one_bit, one_length):
        engine.start_round = Meddling(change).start_round  # type: ignore[method-assign]
        with pytest.raises(AssertionError):
            tiny_engine.play(watched, [True, False])
