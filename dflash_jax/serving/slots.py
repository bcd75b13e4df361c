"""Slots of the arenas: who has which, what free ones still hold, and which to give out.

Plain Python. A round of n rows reads the leading n slots, so that requests are kept together at
the front: a new one gets a slot below the next row bucket, and when a smaller bucket would do, the
last row moves into a free slot (`hole`). A free slot keeps what it holds until it is needed, and a
new request takes over the longest prefix that any slot holds, target K/V and drafter context
together: in place where it may have that slot, else by a copy.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dflash_jax.serving.prefix import PrefixIndex

# A copy costs one dispatch; fewer tokens than this are computed within the prompt's first chunk at
# no measurable cost.
LEAST_COPY = 16


class Place(NamedTuple):
    """Where a request goes and what it takes over.

    Attributes:
        slot: its slot.
        source: the slot that holds the prefix; the same one = in place.
        kv_kept: tokens of the prompt that need not be computed.
        context_kept: how many of the drafter's context rows go with them; less than
            `kv_kept - context_start` where they are gone.
        pages: its row of the page table, in a pool.
        page_copies: (source, own page) of a prefix that ends inside a page.
    """

    slot: int
    source: int
    kv_kept: int
    context_kept: int
    pages: tuple[int, ...] | None = None
    page_copies: tuple[tuple[int, int], ...] = ()


class Slots:
    """Slots of one engine.

    Args:
        buckets: row counts of rounds, ascending; the last is the number of slots.
        reuse: whether prefixes are taken over.
        context_limit: tokens up to which a slot's context is known to be whole; None = none is
            kept, 0 = never (a ring holds only the last positions).
    """

    def __init__(self, buckets: Sequence[int], *, reuse: bool, context_limit: int | None):
        self._buckets = tuple(buckets)
        self._reuse = reuse
        self._context_limit = context_limit
        self._busy: set[int] = set()
        # The first token that a slot's context covers: 0, or later where a prefix came without.
        self._context_start = [0] * buckets[-1]
        self.index = PrefixIndex()
        self.hits = 0
        self.hit_tokens = 0

    @property
    def num_free(self) -> int:
        return self._buckets[-1] - len(self._busy)

    def take(self, tokens: Sequence[int], positions: int = 0) -> Place | None:
        """Gives a slot to a request with these prompt tokens; None when all are taken.

        Any slot has room for all the `positions` that may be asked for. One token at least is left
        to compute: the answer begins with what follows it.
        """
        if not self.num_free:
            return None
        free = self._candidates()
        source, kept = self.index.longest(tokens[:-1]) if self._reuse else (None, 0)
        if source in free and kept:
            slot = source
        else:
            slot = self.index.least_recent(free)
            kept = kept if source is not None and kept >= LEAST_COPY else 0
        if source is None or not kept:
            source, kept = slot, 0
        place = self._place(slot, source, kept)
        self._busy.add(slot)
        self.index.drop(slot)
        if kept:
            self.hits += 1
            self.hit_tokens += kept
            self.index.put(slot, tokens[:kept])
        return place

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """Notes that the slot holds K/V of exactly these tokens now."""
        if self._reuse:
            self.index.put(slot, tokens)

    def release(self, slot: int) -> None:
        """The request has left; what the slot holds stays until it is needed."""
        self._busy.discard(slot)

    def discard(self, slot: int) -> list[int]:
        """The request has left and what it wrote is wrong."""
        self._busy.discard(slot)
        self.index.drop(slot)
        return []

    def begin_context(self, slot: int, start: int) -> None:
        """The slot's context begins behind `start` tokens, whatever it has taken over."""
        self._context_start[slot] = start

    def hole(self) -> tuple[int, int] | None:
        """(from, to) of the row whose move lets a smaller bucket do; None when none does.

        The caller moves the row, then calls `move`.
        """
        if not self._busy:
            return None
        last, enough = max(self._busy), self._bucket(len(self._busy))
        if last < enough:
            return None
        return last, self.index.least_recent(set(range(enough)) - self._busy)

    def move(self, source: int, target: int) -> None:
        """The request has moved; the slot that it left keeps a copy of what it held."""
        self._busy.remove(source)
        self._busy.add(target)
        self._context_start[target] = self._context_start[source]
        self.index.drop(target)

    def _candidates(self) -> set[int]:
        enough = self._bucket(len(self._busy) + 1)
        return set(range(enough)) - self._busy

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _place(self, slot: int, source: int, kept: int) -> Place:
        start = self._context_start[source] if kept else 0
        limit = self._context_limit
        whole = limit is not None and kept > start and kept - start <= limit
        self._context_start[slot] = start if whole else kept
        return Place(slot, source, kept, kept - start if whole else 0)
