"""The target's key/value arena: one row a slot, sized from the served length.

State in, state out: every function returns a new `KVArena`; a compiled program that donates it
updates it in place. Capacity is `max_seq_len + verify_width`, so a round that starts inside the
served length never writes beyond its row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from dflash_jax.arena.rows import (
    KeyValues,
    clean_rows,
    copy_rows,
    empty_layers,
    grow,
    slot_lengths,
    write_rows,
)
from dflash_jax.arena.sizes import kv_capacity
from dflash_jax.config import ResolvedConfig


class KVArena(NamedTuple):
    """Preallocated target K/V.

    Attributes:
        layers: one `KeyValues` [n, k, s, d] a target layer.
        lengths: committed tokens with K/V in each slot, int32 [n]; the anchor is not among them.
    """

    layers: tuple[KeyValues, ...]
    lengths: Int[Array, " n"]


def init_kv_arena(config: ResolvedConfig, dtype: DTypeLike) -> KVArena:
    """Zero-filled arena for `max_batch_size` slots of the served length."""
    target, slots = config.target, config.max_batch_size
    capacity = kv_capacity(config.max_seq_len, config.verify_width)
    shape = (slots, target.num_key_value_heads, capacity, target.head_dim)
    layers = empty_layers(target.num_hidden_layers, shape, jnp.dtype(dtype))
    return KVArena(layers, jnp.zeros((slots,), jnp.int32))


def append_kv(
    arena: KVArena,
    slots: Int[Array, " b"],
    new: Sequence[KeyValues],
    counts: Int[Array, " b"],
) -> KVArena:
    """Writes the first `counts` of each row's new tokens after what the slot holds."""
    starts = slot_lengths(arena.lengths, slots)
    layers = write_rows(arena.layers, slots, starts, new, counts)
    return KVArena(layers, grow(arena.lengths, slots, counts))


def open_kv_slot(arena: KVArena, slot: Int[Array, ""], kept: Int[Array, ""]) -> KVArena:
    """A slot starts over with the first `kept` positions that it holds; the rest is masked."""
    return arena._replace(lengths=arena.lengths.at[slot].set(kept, mode="drop"))


def copy_kv_slot(
    arena: KVArena, source: Int[Array, ""], target: Int[Array, ""], count: Int[Array, ""]
) -> KVArena:
    """The first `count` positions of one slot also in another, whose length they become."""
    layers = copy_rows(arena.layers, source, target, count)
    return KVArena(layers, arena.lengths.at[target].set(count))


def clean_kv_slot(arena: KVArena, slot: Int[Array, ""]) -> KVArena:
    """Zeroes what a slot holds, NaN included."""
    return KVArena(clean_rows(arena.layers, slot), arena.lengths.at[slot].set(0))
