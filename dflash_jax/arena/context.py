"""The drafter's context arena: K/V of the target's projected features, one row a slot.

It grows one to one with committed target positions, always strictly before the anchor. Positions
are slot-local: `append_context` derives them from the slot's length and is the only function that
does, so keys, lengths and rotations cannot disagree. A drafter all of whose layers slide gets a
ring that holds the last positions alone. With `context_store="pool"` the rows lie in pages, at the
places of the target's own (`KVArena.pages`), which every caller hands in.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from dflash_jax.arena.paged import clean_pages, copy_page, table_rows, write_pages
from dflash_jax.arena.rows import (
    ArenaRows,
    KeyValues,
    clean_rows,
    copy_rows,
    empty_layers,
    grow,
    slot_lengths,
    write_rows,
)
from dflash_jax.arena.sizes import context_capacity, drafter_capacity
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


class ContextRing(ContextArena):
    """A `ContextArena` whose rows are used again: position p lies in row p mod s.

    `lengths` and rotations stay absolute. The type tells programs apart when they are traced; an
    arena as long as the served length is none, and its programs know nothing of rings.
    """

    __slots__ = ()


class ContextPool(ContextArena):
    """A `ContextArena` whose layers are pages [p, k, s, d], found through the target's table.

    Row and token of a slot are one and the same here: pages are shared by their tokens, so a
    context never starts behind the first of them, and there is no ring.
    """

    __slots__ = ()


def init_context_arena(config: ResolvedConfig, dtype: DTypeLike) -> ContextArena:
    """Zero-filled arena for `max_batch_size` slots (`sizes.drafter_capacity`), or a pool of pages.

    Raises:
        ConfigError: the configuration has no drafter.
    """
    drafter = config.drafter
    if drafter is None:
        raise ConfigError("there is no drafter, so there is no context arena")
    capacity = drafter_capacity(config)
    whole = context_capacity(
        config.max_seq_len, drafter.max_position_embeddings, config.block_width
    )
    kind, rows = ContextRing if capacity < whole else ContextArena, config.max_batch_size
    if config.context_store == "pool":
        kind, rows, capacity = ContextPool, config.num_pages, config.page_size
    shape = (rows, drafter.num_key_value_heads, capacity, drafter.head_dim)
    return kind(
        empty_layers(drafter.num_hidden_layers, shape, jnp.dtype(dtype)),
        jnp.zeros((config.max_batch_size,), jnp.int32),
        jnp.asarray(drafter.max_position_embeddings, jnp.int32),
    )


def append_context(
    arena: ContextArena,
    slots: Int[Array, " b"],
    features_kv: FeaturesKV,
    counts: Int[Array, " b"],
    *,
    table: Int[Array, "n r"] | None = None,
) -> ContextArena:
    """Appends the context of the first `counts` tokens of every row.

    Args:
        features_kv: makes K/V of the pass's t tokens, given the slot-local position [b] of the
            first; the rest follow it one by one.
        counts: tokens to keep; what would pass `arena.limit` is left out.
        table: pages of the slots, for a `ContextPool`.

    Worked example: length 4, five verified tokens of which two are committed -> the callback is
    given 4 and makes K/V of positions 4 … 8; rows 4 and 5 are written, the length is 6.
    """
    starts = slot_lengths(arena.lengths, slots)
    kept = jnp.clip(counts, 0, jnp.maximum(arena.limit - starts, 0))
    new = features_kv(starts)
    if table is None:
        layers = write_rows(arena.layers, slots, starts, new, kept, ring=_is_ring(arena))
    else:
        pages = table_rows(table, slots, arena.layers)
        layers = write_pages(arena.layers, pages, starts, new, kept)
    return arena._replace(layers=layers, lengths=grow(arena.lengths, slots, kept))


def context_rows(
    arena: ContextArena,
    piece: int | None,
    *,
    pages: Int[Array, "b r"] | None = None,
) -> ArenaRows:
    """The rows of the leading slots, for a block to read; `piece` as in `ArenaRows`.

    Args:
        pages: of those slots, for a `ContextPool`; dead ones have none.
    """
    return ArenaRows(arena.layers, None, piece, _is_ring(arena), pages)


def can_draft(arena: ContextArena, slots: Int[Array, " b"], block_width: int) -> Bool[Array, " b"]:
    """Whether the next block of each row stays within the drafter's positions.

    Once False it stays False: a row that does not draft does not grow its context either.
    """
    return slot_lengths(arena.lengths, slots) + block_width <= arena.limit


def open_context_slot(
    arena: ContextArena, slot: Int[Array, ""], kept: Int[Array, ""]
) -> ContextArena:
    """A slot starts over with the first `kept` rows that it holds; the rest is masked."""
    return arena._replace(lengths=arena.lengths.at[slot].set(kept, mode="drop"))


def copy_context_slot(
    arena: ContextArena, source: Int[Array, ""], target: Int[Array, ""], count: Int[Array, ""]
) -> ContextArena:
    """The first `count` rows of one slot also in another, whose length they become.

    A ring is copied whole where the count passes its rows: every position keeps its row. Of a pool
    nothing is copied: the table says where the rows are.
    """
    layers = arena.layers
    if not isinstance(arena, ContextPool):
        layers = copy_rows(layers, source, target, count)
    return arena._replace(layers=layers, lengths=arena.lengths.at[target].set(count))


def copy_context_page(
    arena: ContextArena, source: Int[Array, ""], target: Int[Array, ""]
) -> ContextArena:
    """One page of a pool also in another; an arena of its own has none."""
    if not isinstance(arena, ContextPool):
        return arena
    return arena._replace(layers=copy_page(arena.layers, source, target))


def clean_context_slot(
    arena: ContextArena, slot: Int[Array, ""], pages: Int[Array, " r"] | None = None
) -> ContextArena:
    """Zeroes what a slot holds, NaN included; of a pool the given pages, which it has alone."""
    if isinstance(arena, ContextPool):
        assert pages is not None
        layers = clean_pages(arena.layers, pages)
    else:
        layers = clean_rows(arena.layers, slot)
    return arena._replace(layers=layers, lengths=arena.lengths.at[slot].set(0))


def _is_ring(arena: ContextArena) -> bool:
    return isinstance(arena, ContextRing)
