"""The drafter's context arena: K/V of the target's projected features, one row a slot.

It grows one to one with committed target positions, always strictly before the anchor. Positions
are slot-local: `append_context` derives them from the slot's length and is the only function that
does, so keys, lengths and rotations cannot disagree.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from dflash_jax.arena.rows import KeyValues, empty_layers, grow, slot_lengths, write_rows
from dflash_jax.arena.sizes import context_capacity
from dflash_jax.config import ResolvedConfig
from dflash_jax.errors import ConfigError

FeaturesKV = Callable[[Int[Array, " b"]], tuple[KeyValues, ...]]


class ContextArena(NamedTuple):
    """Preallocated drafter context.

    Attributes:
        layers: one `KeyValues` [n, k, s, d] a drafter layer.
        lengths: context rows of each slot, int32 [n].
        limit: positions that the drafter was made for, int32 []; no row passes it.
    """

    layers: tuple[KeyValues, ...]
    lengths: Int[Array, " n"]
    limit: Int[Array, ""]


def init_context_arena(config: ResolvedConfig, dtype: DTypeLike) -> ContextArena:
    """Zero-filled arena for `max_batch_size` slots; see `sizes.context_capacity`.

    Raises:
        ConfigError: the configuration has no drafter.
    """
    drafter = config.drafter
    if drafter is None:
        raise ConfigError("there is no drafter, so there is no context arena")
    capacity = context_capacity(
        config.max_seq_len, drafter.max_position_embeddings, config.block_width
    )
    shape = (config.max_batch_size, drafter.num_key_value_heads, capacity, drafter.head_dim)
    return ContextArena(
        empty_layers(drafter.num_hidden_layers, shape, jnp.dtype(dtype)),
        jnp.zeros((config.max_batch_size,), jnp.int32),
        jnp.asarray(drafter.max_position_embeddings, jnp.int32),
    )


def append_context(
    arena: ContextArena,
    slots: Int[Array, " b"],
    features_kv: FeaturesKV,
    counts: Int[Array, " b"],
) -> ContextArena:
    """Appends the context of the first `counts` tokens of every row.

    Args:
        features_kv: makes K/V of the pass's t tokens, given the slot-local position [b] of the
            first; the rest follow it one by one.
        counts: tokens to keep; what would pass `arena.limit` is left out.

    Worked example: length 4, five verified tokens of which two are committed -> the callback is
    given 4 and makes K/V of positions 4 … 8; rows 4 and 5 are written, the length is 6.
    """
    starts = slot_lengths(arena.lengths, slots)
    kept = jnp.clip(counts, 0, jnp.maximum(arena.limit - starts, 0))
    new = features_kv(starts)
    layers = write_rows(arena.layers, slots, starts, new, kept)
    return arena._replace(layers=layers, lengths=grow(arena.lengths, slots, kept))


def can_draft(arena: ContextArena, slots: Int[Array, " b"], block_width: int) -> Bool[Array, " b"]:
    """Whether the next block of each row stays within the drafter's positions.

    Once False it stays False: a row that does not draft does not grow its context either.
    """
    return slot_lengths(arena.lengths, slots) + block_width <= arena.limit


def open_context_slots(
    arena: ContextArena, slots: Int[Array, " b"], fresh: Bool[Array, " b"]
) -> ContextArena:
    """Sets the length of freshly taken slots to 0; their old rows are masked from then on."""
    old = slot_lengths(arena.lengths, slots)
    lengths = arena.lengths.at[slots].set(jnp.where(fresh, 0, old), mode="drop")
    return arena._replace(lengths=lengths)
