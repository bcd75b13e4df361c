"""How a request starts in its slot: the argument of the `open` program, made on the host.

NumPy, which the call puts on the device; `state.py` is the device's side. What a request's
parameters mean is decided by who serves it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from dflash_jax.arena.sizes import MAX_ENDS
from dflash_jax.decoding.options import NO_ID, SlotOptions, TokenCounts, init_counts, init_options
from dflash_jax.decoding.state import Opening


def padded_ids(ids: Collection[int], size: int) -> np.ndarray:
    """Ids as int32 [1, size], filled up with `NO_ID`."""
    row = np.full((1, size), NO_ID, np.int32)
    row[0, : len(ids)] = list(ids)
    return row


def opening_of(
    slot: int,
    remaining: int,
    options: SlotOptions,
    counts: TokenCounts,
    *,
    drafting: bool = True,
    kv_kept: int = 0,
    context_kept: int = 0,
    pages: Sequence[int] | None = None,
) -> Opening:
    """An opening from numbers; fields as of `Opening`.

    Args:
        pages: the slot's whole row of the page table; None: a contiguous arena.
    """
    fields: tuple[Any, ...] = (
        np.int32(slot),
        np.int32(kv_kept),
        np.int32(context_kept),
        np.int32(remaining),
        np.bool_(drafting),
        options,
        counts,
        None if pages is None else np.array(pages, np.int32),
    )
    return Opening(*fields)


def greedy_opening(slot: int, remaining: int, ends: Collection[int], vocab_size: int) -> Opening:
    """A request for the best tokens, up to `remaining` of them or one of `ends`."""
    ban_ids: Any = padded_ids(sorted(ends), MAX_ENDS)
    options = init_options(1)._replace(ban_ids=ban_ids)
    return opening_of(slot, remaining, options, init_counts(1, vocab_size))
