"""Where a request goes and what it takes over, for both layouts behind one protocol.

Contiguous: `slots.py` alone, a slot is its row of the arenas. Paged: a slot is a line of the page
table, and the pages are `pages.py`'s. Plain Python; the device does what a `Place` says.

With the context in the pool, K/V and context of a page are reused together or not at all: only as
many leading pages as have both. A context that began behind reused tokens would lie at the first
places of the request's table, which are the shared pages. With a context arena of its own a request
takes over context that a slot still holds for all of the reused tokens, else it drafts from the
tail.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dflash_jax.arena.sizes import row_pages
from dflash_jax.config import ResolvedConfig
from dflash_jax.serving.pages import Lease, PagePool
from dflash_jax.serving.slots import LEAST_COPY, Place, Slots


@runtime_checkable
class Places(Protocol):
    """What `batch.py` asks of a layout.

    Attributes:
        hits, hit_tokens: requests that took anything over, and the tokens of it.
    """

    hits: int
    hit_tokens: int

    @property
    def num_free(self) -> int:
        """Slots without a request."""
        ...

    def take(self, tokens: Sequence[int], positions: int) -> Place | None:
        """A place for a request that has these tokens and may grow to `positions`; None: not now.

        One token at least is left to compute: the answer begins with what follows it.
        """
        ...

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """Notes that the slot holds K/V of exactly these tokens now."""
        ...

    def release(self, slot: int) -> None:
        """The request has left; what it held stays until the room is needed."""
        ...

    def discard(self, slot: int) -> list[int]:
        """The request has left and what it wrote is wrong; the pages to be zeroed with the slot."""
        ...

    def hole(self) -> tuple[int, int] | None:
        """(from, to) of the row whose move lets a smaller bucket do; None when none does."""
        ...

    def move(self, source: int, target: int) -> None:
        """The request has moved."""
        ...


def make_places(
    config: ResolvedConfig, buckets: Sequence[int], *, reuse: bool, context_limit: int | None
) -> Places:
    """The places of an engine whose arenas are empty; arguments as of `Slots`."""
    if config.kv_layout != "paged":
        return Slots(buckets, reuse=reuse, context_limit=context_limit)
    return PagedSlots(config, buckets, reuse=reuse, context_limit=context_limit)


class PagedSlots:
    """Slots over a pool of pages.

    All that a request may ever write is reserved when it is admitted, the tokens of a round that
    overshoots its end included: a running request never lacks a page. What has no pages waits.

    Args:
        buckets, reuse, context_limit: as of `Slots`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        buckets: Sequence[int],
        *,
        reuse: bool,
        context_limit: int | None,
    ):
        self._row_pages = row_pages(config)
        if config.num_pages < self._row_pages:
            raise ValueError(
                f"a pool of {config.num_pages} pages for rows of {self._row_pages}: it must hold "
                "one at least"
            )
        self._num_pages, self._limit = config.num_pages, context_limit
        self._pool_has_context = config.context_store == "pool" and context_limit is not None
        own_context = context_limit is not None and not self._pool_has_context
        self._slots = Slots(buckets, reuse=reuse and own_context, context_limit=context_limit)
        self.pool = PagePool(config.num_pages, config.page_size, reuse=reuse, least_copy=LEAST_COPY)
        self._leases: dict[int, Lease] = {}
        self.hits = 0
        self.hit_tokens = 0

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def take(self, tokens: Sequence[int], positions: int) -> Place | None:
        if not self.num_free:
            return None
        lease = self.pool.admit(
            tokens, positions - len(tokens), with_context=self._pool_has_context
        )
        if lease is None:
            return None
        kept = lease.reused
        # Where a slot holds the context of what is reused, the request goes there or copies it.
        place = self._slots.take(tokens[: kept + 1], positions)
        assert place is not None
        context_kept = place.context_kept if place.kv_kept == kept else 0
        if not context_kept:
            self._slots.begin_context(place.slot, kept)
        if self._pool_has_context:
            context_kept = kept
        self._leases[place.slot] = lease
        self.hits += kept > 0
        self.hit_tokens += kept
        filler = [self._num_pages] * (self._row_pages - len(lease.pages))
        return Place(
            slot=place.slot,
            source=place.source if context_kept else place.slot,
            kv_kept=kept,
            context_kept=context_kept,
            pages=(*lease.pages, *filler),
            page_copies=tuple(lease.copies),
        )

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        lease = self._leases[slot]
        if self._limit is not None:
            # Behind it the context may be frozen.
            self.pool.commit(lease, tokens[: self._limit], with_context=True)
        self.pool.commit(lease, tokens)
        self._slots.hold(slot, tokens)

    def release(self, slot: int) -> None:
        self.pool.release(self._leases.pop(slot))
        self._slots.release(slot)

    def discard(self, slot: int) -> list[int]:
        self._slots.discard(slot)
        pages = self.pool.discard(self._leases.pop(slot))
        return [*pages, *[self._num_pages] * (self._row_pages - len(pages))]

    def hole(self) -> tuple[int, int] | None:
        return self._slots.hole()

    def move(self, source: int, target: int) -> None:
        self._leases[target] = self._leases.pop(source)
        self._slots.move(source, target)
