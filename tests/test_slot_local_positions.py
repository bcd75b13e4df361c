"""Row 25: context positions count from the slot's start, whatever the target's positions are.

Exact because rotary attention depends on differences only: rows of a full run, taken from token p
on, are those of an empty slot rotated back by p. The oracle rotates in NumPy.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.arena.context import ContextArena, append_context, init_context_arena
from dflash_jax.decoding.draft import BlockDrafter
from dflash_jax.models import DFlashDrafter, Target
from numpy_pair import rotate

TOKENS, CUT = 192, 128
THETA = 10000.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return tiny.write_target(folder / "t"), tiny.write_drafter(folder / "d")


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path]) -> tuple[Target, DFlashDrafter]:
    return dj.load_target(pair[0]), dj.load_drafter(pair[1])


@pytest.fixture(scope="module")
def features(models: tuple[Target, DFlashDrafter]) -> jax.Array:
    """Features [1, t, ae] of one full run."""
    target, drafter = models
    ids = np.random.default_rng(0).integers(0, 97, (1, TOKENS)).astype(np.int32)
    return target.forward(jnp.asarray(ids), drafter.config.target_layer_ids)[1]


@pytest.fixture(scope="module")
def empty(pair: tuple[Path, Path]) -> ContextArena:
    config = tiny_engine.resolved(*pair, max_seq_len=256, max_batch_size=2)
    return init_context_arena(config, jnp.float32)


@pytest.fixture(scope="module")
def append(models: tuple[Target, DFlashDrafter]):
    drafter = models[1]

    def write(arena: ContextArena, slot: int, part: jax.Array) -> ContextArena:
        offsets = jnp.arange(part.shape[1], dtype=jnp.int32)[None, :]
        return append_context(
            arena,
            jnp.asarray([slot], jnp.int32),
            lambda starts: drafter.context_kv(part, starts[:, None] + offsets),
            jnp.asarray([part.shape[1]], jnp.int32),
        )

    return write


def rows(arena: ContextArena, slot: int, start: int, stop: int) -> list[tuple[np.ndarray, ...]]:
    """Keys and values [k, t, d] of every layer."""
    return [
        (np.asarray(layer.keys[slot, :, start:stop]), np.asarray(layer.values[slot, :, start:stop]))
        for layer in arena.layers
    ]


def test_a_tail_written_to_an_empty_slot_is_the_full_run_rotated_back(empty, features, append):
    """Values equal; keys equal those of the full run rotated by -p."""
    full = append(empty, 0, features)
    tail = append(empty, 1, features[:, CUT:])
    assert int(tail.lengths[1]) == TOKENS - CUT
    back = np.full((TOKENS - CUT,), -CUT)
    for (k, v), (k_full, v_full) in zip(
        rows(tail, 1, 0, TOKENS - CUT), rows(full, 0, CUT, TOKENS), strict=True
    ):
        np.testing.assert_allclose(v, v_full, atol=1e-5)
        np.testing.assert_allclose(k, rotate(k_full, back, THETA), atol=1e-5)
        assert np.abs(k - k_full).max() > 0.1  # the rotation is not nothing


def test_keys_sit_at_the_slots_own_places_over_a_hit_and_its_continuation(empty, features, append):
    """128 reused, 40 new: places 0 … 39, length 40; then 24 more: 40 … 63, length 64."""
    arena = append(empty, 1, features[:, 128:168])
    assert arena.lengths.tolist() == [0, 40]
    arena = append(arena, 1, features[:, 168:192])
    assert arena.lengths.tolist() == [0, 64]
    whole = append(empty, 1, features[:, 128:192])
    for ours, theirs in zip(rows(arena, 1, 0, 64), rows(whole, 1, 0, 64), strict=True):
        for mine, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, wanted, atol=1e-5)
    for layer in arena.layers:
        assert not np.asarray(layer.keys[1, :, 64:]).any()
        assert not np.asarray(layer.keys[0]).any()


def test_the_block_begins_one_past_the_context(models, empty, features, append, monkeypatch):
    """The anchor of a slot with n rows of context is at position n."""
    target, drafter = models
    seen: list[list[int]] = []
    inner = DFlashDrafter.block_hidden_cached

    def watching(self, embeddings, lengths, context):
        seen.append(np.asarray(lengths).tolist())
        return inner(self, embeddings, lengths, context)

    monkeypatch.setattr(DFlashDrafter, "block_hidden_cached", watching)
    arena = append(empty, 1, features[:, 128:168])
    slots, anchors = jnp.asarray([0, 1], jnp.int32), jnp.asarray([3, 7], jnp.int32)
    BlockDrafter(drafter, target, 3, None).propose(arena, slots, anchors, None)
    assert seen == [[0, 40]]


@pytest.mark.parametrize("shift", [1, 64, 300])
def test_draft_logits_do_not_depend_on_where_context_and_block_stand(models, features, shift):
    """A uniform shift of both leaves the logits, to 1e-4."""
    target, drafter = models
    part = features[0, 128:168]
    block = jnp.asarray([7, tiny.MASK, tiny.MASK, tiny.MASK], jnp.int32)
    at = jnp.arange(40, 44, dtype=jnp.int32)
    _, here = drafter.forward(part, block, at, target.embedding, target.head)
    _, there = drafter.forward(part, block, at + shift, target.embedding, target.head)
    np.testing.assert_allclose(np.asarray(here), np.asarray(there), atol=1e-4)
