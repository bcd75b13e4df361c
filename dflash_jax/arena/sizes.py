"""Byte formulas of the arenas: one place for the plan and for the allocation.

Pure integer arithmetic, no JAX. The number that the planner prints is the `nbytes` of the arrays
that `kv.py` and `context.py` allocate, to the byte; capacities come from here too.
"""

from collections.abc import Sequence

from dflash_jax.config import DrafterConfig, ResolvedConfig
from dflash_jax.errors import ConfigError

MAX_BIAS = 300
"""Ids with a bias of their own in one request: the most that the OpenAI API takes."""

MAX_ENDS = 32
"""Ids that end one answer: a model names a handful, the rest are a request's `stop_token_ids`."""


def kv_capacity(max_seq_len: int, verify_width: int) -> int:
    """Positions of one `KVArena` row: the served length and one round that starts inside it."""
    return max_seq_len + verify_width


def row_pages(config: ResolvedConfig) -> int:
    """Pages of one row of a pool: r of the page table.

    Enough for the context too where the pool holds that: its rows are the same tokens, and a block
    is no wider than what is verified.
    """
    positions = kv_capacity(config.max_seq_len, config.verify_width)
    return -(-positions // config.page_size)


def context_capacity(
    max_seq_len: int | None,
    drafter_positions: int | None,
    block_width: int,
    *,
    window: int | None = None,
    paged: bool = False,
    page_size: int = 32,
) -> int:
    """Positions of one `ContextArena` row: min of what is known, plus the block, page-rounded.

    A drafter made for a million positions and served at 49,152 is sized by 49,152; one whose
    layers all slide over the last 2,048 by 2,048. (A block reads `window` - 1 rows at most, so
    the block's own places are slack there, as they are in every other arena.)

    Args:
        window: the widest window when *all* layers have one (`widest_window`); None = no bound.

    Raises:
        ConfigError: neither length is known.
    """
    known = [n for n in (max_seq_len, drafter_positions) if n is not None]
    if not known:
        raise ConfigError("neither max_seq_len nor the drafter's positions are known: set one")
    capacity = min(known if window is None else [*known, window]) + block_width
    return -(-capacity // page_size) * page_size if paged else capacity


def widest_window(windows: Sequence[int | None]) -> int | None:
    """How far back the layers of a drafter look: None when one of them sees everything."""
    sliding = [window for window in windows if window is not None]
    return max(sliding) if sliding and len(sliding) == len(windows) else None


def drafter_context(drafter: DrafterConfig, max_seq_len: int) -> int:
    """Most context positions that a row ever holds: served length, positions, all-layer window."""
    return context_capacity(
        max_seq_len,
        drafter.max_position_embeddings,
        0,
        window=widest_window(drafter.windows),
    )


def drafter_capacity(config: ResolvedConfig) -> int:
    """Positions of one `ContextArena` row of an engine, for plan and allocation; 0: no drafter."""
    drafter = config.drafter
    if drafter is None:
        return 0
    return drafter_context(drafter, config.max_seq_len) + config.block_width


def kv_heads_per_shard(num_kv_heads: int, shards: int) -> int:
    """KV heads that one shard holds; the last shard may hold fewer."""
    return -(-num_kv_heads // shards)


def kv_arena_bytes(
    *,
    max_batch_size: int,
    capacity: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    kv_factor: int = 2,
    shards: int = 1,
) -> int:
    """Bytes of a target arena on one shard: slots x K and V x layers x positions x heads x dim."""
    heads = kv_heads_per_shard(num_kv_heads, shards)
    return max_batch_size * kv_factor * num_layers * capacity * heads * head_dim * dtype_bytes


def context_arena_bytes(
    *,
    max_batch_size: int,
    max_context: int,
    block_width: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    kv_factor: int = 2,
    paged: bool = False,
    page_size: int = 32,
    shards: int = 1,
    scratch_rows: int = 1,
) -> int:
    """Bytes of a drafter context arena on one shard.

    (max_batch_size + scratch_rows) slots of max_context + block_width positions, page-rounded
    where `paged`. This engine drops dead writes and allocates with `scratch_rows=0`.
    """
    return kv_arena_bytes(
        max_batch_size=max_batch_size + scratch_rows,
        capacity=context_capacity(max_context, None, block_width, paged=paged, page_size=page_size),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
        kv_factor=kv_factor,
        shards=shards,
    )


def options_bytes(n: int) -> int:
    """Bytes of `SlotOptions` for n slots: nine numbers, the two lists and two flags."""
    return n * (9 * 4 + MAX_BIAS * (4 + 4) + MAX_ENDS * 4 + 2)


def counts_bytes(n: int, v: int) -> int:
    """Bytes of `TokenCounts` for n slots: a flag and a number for every id of the vocabulary."""
    return n * v * (1 + 4)


def token_state_bytes(
    max_batch_size: int, vocab_size: int, *, context: bool, row_pages: int = 0
) -> int:
    """Bytes of what a slot has besides its arenas' rows: `TokenState`, and the arenas' lengths.

    Anchor, what remains, length in the KV arena and whether it drafts; options and counts. With a
    context arena its length too, and the drafter's limit once for all. In a pool its row of the
    page table.
    """
    slots = (13 + 4 * row_pages) * max_batch_size + options_bytes(max_batch_size)
    lengths = 4 * (max_batch_size + 1) if context else 0
    return slots + lengths + counts_bytes(max_batch_size, vocab_size)
