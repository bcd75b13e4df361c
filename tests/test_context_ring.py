"""Fault 98: a drafter all of whose layers slide gets a ring of window + block rows, and no more.

Three oracles: positions simulated in plain Python; the drafter over its loose, whole context; and
an engine whose arena is as long as the served length, round by round.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.arena import context as contexts
from dflash_jax.arena import sizes
from dflash_jax.arena.context import ContextArena, ContextRing, append_context, context_rows
from dflash_jax.arena.rows import KeyValues, ring_positions, rows_for
from dflash_jax.decoding.programs import init_state
from dflash_jax.models.layers import embed_ids, unembed
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from numpy_pair import NumpyTarget
from tiny_engine import HostDrafter, among

WINDOW, WIDTH = 8, 4
CAPACITY = WINDOW + WIDTH
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
ALL = {**SLIDING, "layer_types": ["sliding_attention"] * 2}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}


def state_of(folder: Path, served: int, **changes: Any) -> Any:
    target = tiny.write_target(folder / "target", max_position_embeddings=4096)
    drafter = tiny.write_drafter(folder / "drafter", max_position_embeddings=4096, **changes)
    config = tiny_engine.resolved(target, drafter, max_seq_len=served, max_batch_size=3)
    return config, init_state(config)


def test_a_window_of_8_served_at_4096_gets_12_rows():
    """Fault 98. The widest window counts, and only when all layers have one."""
    assert sizes.context_capacity(4096, 40_960, 4, window=8) == 12
    assert sizes.context_capacity(4096, 40_960, 4) == 4100
    assert sizes.context_capacity(6, 40_960, 4, window=8) == 10
    assert sizes.context_capacity(4096, 40_960, 4, window=8, paged=True) == 32
    assert sizes.widest_window((8, 16, 8)) == 16
    assert sizes.widest_window((8, None)) is sizes.widest_window((None,)) is None
    with pytest.raises(dj.ConfigError, match="set one"):
        sizes.context_capacity(None, None, 4, window=8)


@pytest.mark.parametrize(
    ("changes", "served", "rows", "kind"),
    [
        (ALL, 4096, 12, ContextRing),
        (ALL, 9, 12, ContextRing),
        (ALL, 8, 12, ContextArena),
        (ALL, 5, 9, ContextArena),
        (MIXED, 4096, 4100, ContextArena),
        ({}, 4096, 4100, ContextArena),
    ],
)
def test_what_is_allocated_is_what_is_planned(tmp_path, changes, served, rows, kind):
    """Fault 98; invariant 5. Where a ring would save nothing there is none."""
    config, state = state_of(tmp_path, served, **changes)
    assert type(state.context) is kind
    assert sizes.drafter_capacity(config) == rows
    assert {leaf.shape for leaf in jax.tree.leaves(state.context.layers)} == {(3, 2, rows, 16)}
    planned = sizes.context_arena_bytes(
        max_batch_size=3,
        max_context=sizes.drafter_context(config.drafter, served),
        block_width=4,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        dtype_bytes=4,
        scratch_rows=0,
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state.context.layers)) == planned
    assert planned == 3 * rows * (2 * 2 * 16 * 2 * 4)
    assert state.kv.layers[0].keys.shape[2] == served + 4


def held(capacity: int, length: int) -> list[int]:
    """The last position below `length` of every row; -1 where there is none."""
    rows = [-1] * capacity
    for position in range(length):
        rows[position % capacity] = position
    return rows


@pytest.mark.parametrize("capacity", [1, 4, 5])
def test_a_row_of_a_ring_holds_the_last_position_that_falls_on_it(capacity):
    lengths = range(3 * capacity + 2)
    rows = jnp.arange(capacity, dtype=jnp.int32)
    found = np.array(ring_positions(rows, jnp.array(lengths, jnp.int32), capacity))
    assert [[max(p, -1) for p in row] for row in found.tolist()] == [
        held(capacity, length) for length in lengths
    ]


@pytest.mark.parametrize(("width", "capacity"), [(3, 5), (5, 5), (13, 5), (4, 1)])
def test_a_chunk_names_no_row_of_a_ring_twice(width, capacity):
    """It keeps the last tokens that count; a scatter that names a row twice may write either."""
    cases = [(start, count) for start in (0, 3, 9) for count in range(width + 1)]
    starts, counts = jnp.array(cases, jnp.int32).T
    found = rows_for(starts, counts, width, capacity, ring=True).tolist()
    for (start, count), rows in zip(cases, found, strict=True):
        first = max(0, count - capacity)
        wanted = [(start + i) % capacity for i in range(first, count)]
        assert rows == [capacity] * first + wanted + [capacity] * (width - count)
        assert len(set(wanted)) == len(wanted)


def numbered(starts: jax.Array, width: int) -> tuple[KeyValues, ...]:
    """K and V whose every entry is the position they stand for."""
    places = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    entries = jnp.broadcast_to(places[:, None, :, None], (len(starts), 1, width, 2))
    return (KeyValues(entries.astype(jnp.float32), -entries.astype(jnp.float32)),)


def test_appends_of_any_size_leave_the_last_positions_each_in_its_row():
    """Fault 49: chunks of up to three rings, the same final rows whatever came before.

    A dead row, an idle slot and the drafter's limit change none.
    """
    capacity, limit, slots = 5, 37, jnp.array([2, 4, 0], jnp.int32)
    empty = jnp.full((4, 1, capacity, 2), -1, jnp.float32)
    arena = ContextRing(
        (KeyValues(empty, -empty),), jnp.zeros((4,), jnp.int32), jnp.asarray(limit, jnp.int32)
    )
    rng, lengths = np.random.default_rng(0), [0, 0, 0, 0]
    for width in (15, 4, 4, 1, 4, 15, 4, 15):
        counts = rng.integers(0, width + 1, 3)
        arena = append_context(
            arena,
            slots,
            lambda starts, width=width: numbered(starts, width),
            jnp.asarray(counts, jnp.int32),
        )
        lengths[2] = min(lengths[2] + int(counts[0]), limit)
        lengths[0] = min(lengths[0] + int(counts[2]), limit)
        assert arena.lengths.tolist() == lengths
        wanted = [held(capacity, length) for length in lengths]
        assert arena.layers[0].keys[:, 0, :, 0].tolist() == wanted
        np.testing.assert_array_equal(arena.layers[0].values, -arena.layers[0].keys)
    assert lengths[2] == limit and lengths[1] == lengths[3] == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dj.DFlashDrafter]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "causal": dj.load_drafter(tiny.write_drafter(folder / "causal", **ALL)),
        "both ways": dj.load_drafter(tiny.write_drafter(folder / "both", **ALL, is_causal=False)),
    }


STEPS = ((1, 30), (3, 4), (20, 1), (4, 0), (1, 4), (2, 2))
LONGEST = 48


def over_the_whole_context(drafter: dj.DFlashDrafter) -> Any:
    """(features of all positions, how many count, block) -> hidden states; masks from NumPy."""

    @jax.jit
    def run(features: jax.Array, block: jax.Array, places: jax.Array, seen: jax.Array) -> jax.Array:
        context = drafter.context_kv(features, jnp.arange(LONGEST, dtype=jnp.int32)[None, :])
        among = drafter.block_masks(WIDTH)
        return drafter.block_hidden(block, places, context, [seen, seen], among)

    def hidden(features: np.ndarray, length: int, block: jax.Array) -> jax.Array:
        places = length + np.arange(WIDTH, dtype=np.int32)
        rows = np.arange(LONGEST)
        seen = (rows < length) & (places[:, None] - rows < WINDOW)
        return run(features[None], block[None], places[None], seen[None])[0]

    return hidden


@pytest.mark.parametrize("piece", [None, 5])
@pytest.mark.parametrize("name", ["causal", "both ways"])
def test_a_block_over_a_ring_is_the_block_over_the_whole_context(models, name, piece):
    """Two slots of different lengths, through chunks longer than the ring. Dead rows hold 1e4."""
    drafter, expected = models[name], over_the_whole_context(models[name])
    rng = np.random.default_rng(0)
    blocks = jnp.asarray(rng.standard_normal((2, WIDTH, 32)), jnp.float32)

    @jax.jit
    def step(arena: ContextArena, new: jax.Array, counts: jax.Array) -> tuple[Any, jax.Array]:
        places = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
        arena = append_context(
            arena,
            jnp.array([0, 1], jnp.int32),
            lambda starts: drafter.context_kv(new, starts[:, None] + places),
            counts,
        )
        rows = context_rows(arena, piece)
        return arena, drafter.block_hidden_cached(blocks, arena.lengths, rows)

    dead = jnp.full((2, 2, CAPACITY, 16), 1e4, jnp.float32)
    arena = ContextRing(
        (KeyValues(dead, dead),) * 2, jnp.zeros((2,), jnp.int32), jnp.asarray(512, jnp.int32)
    )
    features, lengths = np.zeros((2, LONGEST, 64), np.float32), [0, 0]
    for counts in STEPS:
        new = rng.standard_normal((2, 30, 64)).astype(np.float32)
        arena, hidden = step(arena, new, jnp.array(counts, jnp.int32))
        for row, count in enumerate(counts):
            features[row, lengths[row] : lengths[row] + count] = new[row, :count]
            lengths[row] += count
            wanted = expected(features[row], lengths[row], blocks[row])
            np.testing.assert_allclose(hidden[row], wanted, rtol=0, atol=1e-5)
    assert lengths == [31, 41]


@dataclasses.dataclass
class Side:
    """An engine, its batch, and what its drafter would propose for every slot after each round."""

    engine: Engine
    batch: Batch
    host: HostDrafter
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)


SERVED, CHUNK = 104, 32
LENGTHS = ((5, 40), (70, 30), (13, 24), (33, 40))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return tiny.write_target(folder / "target"), tiny.write_drafter(folder / "drafter", **ALL)


def side(pair: tuple[Path, Path]) -> Side:
    host = HostDrafter()
    options: dict[str, Any] = {"max_seq_len": SERVED, "max_batch_size": 2, "max_num_tokens": CHUNK}
    engine = tiny_engine.engine(*pair, host, row_sizes=(2,), read_piece=5, **options)
    return Side(engine, Batch(engine), host)


@pytest.fixture(scope="module")
def sides(pair: tuple[Path, Path]) -> tuple[Side, Side]:
    """One engine with a ring, one with the same drafter and rows for the whole served length."""
    ring = side(pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "drafter_capacity", lambda config: SERVED + WIDTH)
        whole = side(pair)
    return ring, whole


def draft_logits(pair: tuple[Path, Path]) -> Any:
    """(state) -> the drafter's own logits [n, W, v] over the context as it is."""
    target, drafter = dj.load_target(pair[0]), dj.load_drafter(pair[1])

    @jax.jit
    def logits(state: Any) -> jax.Array:
        masks = jnp.full((2, WIDTH - 1), tiny.MASK, jnp.int32)
        ids = jnp.concatenate([state.tokens.anchors[:, None], masks], axis=1)
        hidden = drafter.block_hidden_cached(
            embed_ids(target.embedding, ids), state.context.lengths, context_rows(state.context, 5)
        )
        return unembed(hidden, target.head, tiny.VOCAB)

    return logits


def test_an_engine_with_a_ring_drafts_and_answers_as_one_with_every_row(pair, sides):
    """Faults 49, 98. Prompts of one to three chunks, each beyond the ring; slots are used again."""
    oracle = NumpyTarget(pair[0])
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n, _ in LENGTHS]
    answers = [oracle.greedy(ids, count) for ids, (_, count) in zip(prompts, LENGTHS, strict=True)]
    texts = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
    logits = draft_logits(pair)
    for one in sides:
        one.host.rule = among(texts, wrong=lambda length: length % 6)
        rows = [
            tiny_engine.request(ids, dj.SamplingParams(max_tokens=len(answer)))
            for ids, answer in zip(prompts, answers, strict=True)
        ]
        for row in rows:
            tiny_engine.one_at_a_time(one.batch).submit(row)
        while any(row.finish_reason is None for row in rows):
            one.batch.step()
            one.logits.append(np.asarray(logits(one.engine.state)))
        assert [row.token_ids for row in rows] == answers
        accepted = {n for row in rows for n in row.stats.accepted_drafts_per_round}
        assert accepted == {0, 1, 2, 3}
    ring, whole = sides
    assert type(ring.engine.state.context) is ContextRing
    assert type(whole.engine.state.context) is ContextArena
    assert len(ring.logits) == len(whole.logits) > 20
    for ours, theirs in zip(ring.logits, whole.logits, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_drafter_with_a_ring_of_its_own_drafts_leaves_the_text_alone(pair, sides):
    ring, whole = sides
    ids = np.random.default_rng(1).integers(0, 97, 45).tolist()
    stats = []
    for one in (ring, whole):
        one.host.rule = None
        row = tiny_engine.run(one.batch, (ids, 40))[0]
        assert row.token_ids == NumpyTarget(pair[0]).greedy(ids, 40)
        stats.append(row.stats)
    assert stats[0] == stats[1]


def test_programs_update_a_ring_in_place(sides):
    """Invariant 6: alias bytes are the arenas'; temporaries are no more than with every row."""
    ring, whole = sides
    names = {"prefill-32", "round-2-greedy"}
    for name in names:
        memories = [one.engine.programs[name].compiled.memory_analysis() for one in (ring, whole)]  # type: ignore[attr-defined]
        state = ring.engine.state
        layers = jax.tree.leaves((state.kv.layers, state.context.layers))
        assert memories[0].alias_size_in_bytes >= sum(leaf.nbytes for leaf in layers)
        assert memories[0].temp_size_in_bytes <= memories[1].temp_size_in_bytes + 4096
