"""The paged pool: what it takes of the memory that is left, and how many requests that holds.

The counterpart of the reference's managed KV pool. A pool is elastic: it needs pages for one row of
the served length, takes what options and memory allow, and where it holds fewer rows than the batch
has, admission queues. What is kept for programs comes off the pool, not on top of it.
"""

from typing import NamedTuple

from dflash_jax.arena.sizes import row_pages
from dflash_jax.config import ResolvedConfig, ServeConfig
from dflash_jax.planning.budget import Order
from dflash_jax.planning.footprint import Footprint, page_bytes


class Pool(NamedTuple):
    """A pool of `pages` pages of `page_bytes` bytes; a row of served length takes `row_pages`."""

    pages: int
    page_bytes: int
    row_pages: int

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return self.pages * self.page_bytes

    @property
    def least(self) -> int:
        """Bytes for one row of the served length."""
        return self.row_pages * self.page_bytes

    @property
    def rows(self) -> int:
        """Rows of the served length that it holds."""
        return self.pages // self.row_pages


def plan_pool(
    config: ResolvedConfig,
    serve: ServeConfig,
    held: Footprint,
    *,
    free: int,
    order: Order,
    kept: int = 0,
    shards: int = 1,
    host_memory: bool = False,
) -> Pool:
    """The pool of a paged configuration.

    Args:
        held: everything else.
        free: bytes that everything together may take.
        order: arena_first: the share is of what the context arena leaves; pool_first: of what
            weights, buffers and token state leave.
        kept: bytes of what is left that the pool never takes: the reserve, or what programs need.
        host_memory: others live of it too: no share of it is taken, but what the batch can fill.
    """
    one = page_bytes(config, shards=shards)
    row = row_pages(config)
    if serve.kv_max_tokens is not None:
        return Pool(-(-serve.kv_max_tokens // config.page_size), one, row)
    before = held.total if order == "arena_first" else held.total - held.context_arena
    left = max(0, free - before)
    wanted = min(int(left * serve.kv_memory_fraction), max(0, left - kept))
    if serve.kv_max_bytes is not None:
        wanted = min(wanted, serve.kv_max_bytes)
    elif host_memory:
        wanted = min(wanted, config.max_batch_size * row * one)
    return Pool(wanted // one, one, row)
