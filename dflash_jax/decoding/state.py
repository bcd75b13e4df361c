"""What an engine keeps on the device, and the programs that change a slot without a model's pass.

`open_slot` starts a request in a slot, `copy_slot` takes a prefix or a whole row to another slot,
`clean_slot` zeroes one; `copy_page` copies a page of a pool. All are pure functions that programs
compile with the state donated; the passes themselves are `round.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.arena.context import (
    ContextArena,
    clean_context_slot,
    copy_context_page,
    copy_context_slot,
    init_context_arena,
    open_context_slot,
)
from dflash_jax.arena.kv import (
    KVArena,
    clean_kv_slot,
    copy_kv_page,
    copy_kv_slot,
    init_kv_arena,
    open_kv_slot,
)
from dflash_jax.config import ResolvedConfig
from dflash_jax.decoding.options import SlotOptions, TokenCounts, init_counts, init_options


class TokenState(NamedTuple):
    """What a slot needs to go on, besides its arenas.

    Attributes:
        anchors: last committed token, without K/V or feature yet, int32 [n].
        remaining: tokens that its answer may still get, int32 [n]; 0 = it has ended, and a round
            that was dispatched before the host knew changes nothing.
        drafting: whether its rounds verify drafts, bool [n].
        options: how its tokens are chosen.
        counts: what penalties count.
    """

    anchors: Int[Array, " n"]
    remaining: Int[Array, " n"]
    drafting: Bool[Array, " n"]
    options: SlotOptions
    counts: TokenCounts


class EngineState(NamedTuple):
    """All that compiled programs donate and hand back; `context` is None where none is kept."""

    kv: KVArena
    context: ContextArena | None
    tokens: TokenState


class Opening(NamedTuple):
    """How a request starts in its slot; leaves have no slot axis, or one of length 1.

    Attributes:
        slot: int32 [].
        kv_kept: positions of the target's arena that it takes over, int32 [].
        context_kept: the same of the drafter's, int32 []; fewer where the context is gone.
        remaining, drafting: as in `TokenState`, [].
        options, counts: as in `TokenState`, one row.
        pages: the slot's row of the page table, int32 [r]; None without a pool.
    """

    slot: Int[Array, ""]
    kv_kept: Int[Array, ""]
    context_kept: Int[Array, ""]
    remaining: Int[Array, ""]
    drafting: Bool[Array, ""]
    options: SlotOptions
    counts: TokenCounts
    pages: Int[Array, " r"] | None = None


class Transfer(NamedTuple):
    """What goes from one slot to another.

    Attributes:
        source, target: slots, int32 [].
        kv_count, context_count: positions of each arena, int32 []; not read where `whole`. In a
            pool no K/V is copied, and the table is what `open_slot` makes of it.
        whole: whether the request itself moves: all positions and its token state, bool [].
    """

    source: Int[Array, ""]
    target: Int[Array, ""]
    kv_count: Int[Array, ""]
    context_count: Int[Array, ""]
    whole: Bool[Array, ""]


class PageCopy(NamedTuple):
    """A page of the pool that is taken over in part, and the request's own; int32 []."""

    source: Int[Array, ""]
    target: Int[Array, ""]


class Cleaning(NamedTuple):
    """A slot to be zeroed, int32 []; in a pool the pages that it had alone, int32 [r]."""

    slot: Int[Array, ""]
    pages: Int[Array, " r"] | None = None


def init_state(config: ResolvedConfig) -> EngineState:
    """Arenas and token state of an engine, zero-filled, all lengths 0."""
    slots = config.max_batch_size
    dtype = jnp.dtype(config.dtype)
    return EngineState(
        kv=init_kv_arena(config, dtype),
        context=init_context_arena(config, dtype) if config.speculation == "dflash" else None,
        tokens=TokenState(
            anchors=jnp.zeros((slots,), jnp.int32),
            remaining=jnp.zeros((slots,), jnp.int32),
            drafting=jnp.zeros((slots,), jnp.bool_),
            options=init_options(slots),
            counts=init_counts(slots, config.target.vocab_size),
        ),
    )


def open_slot(state: EngineState, opening: Opening) -> EngineState:
    """Starts a request: what it takes over, its limits and how its tokens are chosen."""
    slot, tokens = opening.slot, state.tokens

    def put(array: Array, row: Array) -> Array:
        return array.at[slot].set(row.reshape(array.shape[1:]))

    context = state.context
    if context is not None:
        context = open_context_slot(context, slot, opening.context_kept)
    return EngineState(
        open_kv_slot(state.kv, slot, opening.kv_kept, opening.pages),
        context,
        TokenState(
            anchors=tokens.anchors,
            remaining=put(tokens.remaining, opening.remaining),
            drafting=put(tokens.drafting, opening.drafting),
            options=jax.tree.map(put, tokens.options, opening.options),
            counts=jax.tree.map(put, tokens.counts, opening.counts),
        ),
    )


def copy_slot(state: EngineState, transfer: Transfer) -> EngineState:
    """Copies a prefix (`open_slot` follows), or moves a request with all that belongs to it."""
    source, target = transfer.source, transfer.target

    def move(array: Array) -> Array:
        return array.at[target].set(jnp.where(transfer.whole, array[source], array[target]))

    def count(lengths: Array, wanted: Array) -> Array:
        return jnp.where(transfer.whole, lengths[source], wanted)

    context = state.context
    if context is not None:
        rows = count(context.lengths, transfer.context_count)
        context = copy_context_slot(context, source, target, rows)
    tokens = jax.tree.map(move, state.tokens)
    # The source has no request any more: a round over the leading rows must not advance it.
    ended = jnp.where(transfer.whole, 0, tokens.remaining[source])
    return EngineState(
        copy_kv_slot(state.kv, source, target, count(state.kv.lengths, transfer.kv_count)),
        context,
        tokens._replace(remaining=tokens.remaining.at[source].set(ended)),
    )


def copy_page(state: EngineState, pages: PageCopy) -> EngineState:
    """Copies one page of the pool, context included where it lies there."""
    context = state.context
    if context is not None:
        context = copy_context_page(context, *pages)
    return state._replace(kv=copy_kv_page(state.kv, *pages), context=context)


def clean_slot(state: EngineState, cleaning: Cleaning) -> EngineState:
    """Zeroes a slot whose numbers went wrong, and ends its request."""
    context, (slot, pages) = state.context, cleaning
    return EngineState(
        clean_kv_slot(state.kv, slot, pages),
        None if context is None else clean_context_slot(context, slot, pages),
        state.tokens._replace(remaining=state.tokens.remaining.at[slot].set(0)),
    )
