"""The target's key/value arena: one row a slot, or pages of a pool, sized from the served length.

State in, state out: every function returns a new `KVArena`; a compiled program that donates it
updates it in place. Capacity is `max_seq_len + verify_width`, so a round that starts inside the
served length never writes beyond its row. In a pool (`kv_layout="paged"`) a row is the pages that
the table lists for its slot; lengths stay the slots'.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

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
from dflash_jax.arena.sizes import kv_capacity, row_pages
from dflash_jax.config import ResolvedConfig


class KVArena(NamedTuple):
    """Preallocated target K/V.

    Attributes:
        layers: one `KeyValues` [n, k, s, d] a target layer; [p, k, s, d] of a pool.
        lengths: committed tokens with K/V in each slot, int32 [n]; the anchor is not among them.
        pages: of each slot in a pool, int32 [n, r], filled up with p; None = a row is a slot's own.
            The drafter's context lies at the same places where the pool holds it too.
    """

    layers: tuple[KeyValues, ...]
    lengths: Int[Array, " n"]
    pages: Int[Array, "n r"] | None = None


def init_kv_arena(config: ResolvedConfig, dtype: DTypeLike) -> KVArena:
    """Zero-filled arena for `max_batch_size` slots of the served length, or a pool of pages."""
    target, slots, paged = config.target, config.max_batch_size, config.kv_layout == "paged"
    rows = (config.num_pages if paged else slots, target.num_key_value_heads)
    capacity = kv_capacity(config.max_seq_len, config.verify_width)
    shape = (*rows, config.page_size if paged else capacity, target.head_dim)
    layers = empty_layers(target.num_hidden_layers, shape, jnp.dtype(dtype))
    pages = jnp.full((slots, row_pages(config)), config.num_pages, jnp.int32) if paged else None
    return KVArena(layers, jnp.zeros((slots,), jnp.int32), pages)


def kv_rows(
    arena: KVArena, slots: Int[Array, " b"], piece: int | None, *, first: Int[Array, ""] | None
) -> ArenaRows:
    """The rows of slots for a pass to read; a row's dead slot has no pages.

    Args:
        first: the first of the slots, which are consecutive; None = 0.
    """
    if arena.pages is None:
        return ArenaRows(arena.layers, first, piece)
    pages = table_rows(arena.pages, slots, arena.layers)
    return ArenaRows(arena.layers, None, piece, pages=pages)


def append_kv(
    arena: KVArena,
    slots: Int[Array, " b"],
    new: Sequence[KeyValues],
    counts: Int[Array, " b"],
) -> KVArena:
    """Writes the first `counts` of each row's new tokens after what the slot holds."""
    starts = slot_lengths(arena.lengths, slots)
    if arena.pages is None:
        layers = write_rows(arena.layers, slots, starts, new, counts)
    else:
        pages = table_rows(arena.pages, slots, arena.layers)
        layers = write_pages(arena.layers, pages, starts, new, counts)
    return arena._replace(layers=layers, lengths=grow(arena.lengths, slots, counts))


def open_kv_slot(
    arena: KVArena,
    slot: Int[Array, ""],
    kept: Int[Array, ""],
    pages: Int[Array, " r"] | None = None,
) -> KVArena:
    """A slot starts over with the first `kept` positions that it holds; the rest is masked.

    Args:
        pages: what the slot holds from now on, in a pool.
    """
    table = None
    if arena.pages is not None:
        table = arena.pages.at[slot].set(pages, mode="drop")
    return arena._replace(lengths=arena.lengths.at[slot].set(kept, mode="drop"), pages=table)


def copy_kv_slot(
    arena: KVArena, source: Int[Array, ""], target: Int[Array, ""], count: Int[Array, ""]
) -> KVArena:
    """The first `count` positions of one slot also in another, whose length they become.

    In a pool nothing is copied: the other slot lists the same pages.
    """
    lengths = arena.lengths.at[target].set(count)
    if arena.pages is not None:
        table = arena.pages.at[target].set(arena.pages[source])
        return arena._replace(lengths=lengths, pages=table)
    return arena._replace(layers=copy_rows(arena.layers, source, target, count), lengths=lengths)


def copy_kv_page(arena: KVArena, source: Int[Array, ""], target: Int[Array, ""]) -> KVArena:
    """One page of a pool also in another."""
    return arena._replace(layers=copy_page(arena.layers, source, target))


def clean_kv_slot(
    arena: KVArena, slot: Int[Array, ""], pages: Int[Array, " r"] | None = None
) -> KVArena:
    """Zeroes what a slot holds, NaN included; of a pool the given pages, which it has alone."""
    if pages is None:
        layers = clean_rows(arena.layers, slot)
    else:
        layers = clean_pages(arena.layers, pages)
    return arena._replace(layers=layers, lengths=arena.lengths.at[slot].set(0))
