"""Who holds which page of the paged layout: the host side of one page table for both pools.

Host state in plain Python, nothing of JAX; the device arrays are `arena/paged.py`'s, what is read
and written there follows the page lists kept here. Pages are found by their tokens in
`page_index.py`. Whole slots that keep their tokens, the contiguous counterpart, are `prefix.py`'s.

A page is free, used (listed by at least one lease) or cached: held by nobody, its tokens known, and
kept until its place is needed. Only full pages are ever known, so a page that can still be written
is one request's own.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from dflash_jax.serving.page_index import Content, PageIndex


@dataclasses.dataclass(eq=False)
class Lease:
    """What one request holds of a pool.

    Attributes:
        pages: ids; position p of the request lies in `pages[p // page_size]`.
        reused: leading prompt tokens whose target K/V is there already.
        context_reused: leading ones of them whose drafter context is there too.
        copies: (source, own page), to copy on the device before anything is written for this
            request. The first `commit` says that it was done: until then sources are kept intact.
        committed: leading positions whose tokens the pool was told.
        content: of the last full page of them.
        has_context: whether all of these positions have drafter context.
    """

    pages: list[int]
    reused: int
    context_reused: int
    copies: list[tuple[int, int]]
    committed: int
    content: Content
    has_context: bool


class PagePool:
    """`num_pages` pages of `page_size` positions, shared by requests that start alike.

    Attributes:
        hits, hit_tokens: admissions that reused anything, and the tokens that they reused.
        evictions: cached pages whose tokens were given up for somebody else.
    """

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True, least_copy: int = 1):
        """A pool that holds nothing.

        Args:
            reuse: False: no page is ever shared or cached.
            least_copy: fewer tokens than this of one page are computed rather than copied.
        """
        self._least_copy = least_copy
        self.page_size = page_size
        self.hits = self.hit_tokens = self.evictions = 0
        self._reuse = reuse
        self._index = PageIndex(num_pages, page_size)
        self._pages = self._index.pages
        self._free = list(reversed(range(num_pages)))
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that keep their tokens until they are needed."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return len(self._pages) - self.free - self.cached

    def admit(
        self, tokens: Sequence[int], reserve: int, *, with_context: bool = False
    ) -> Lease | None:
        """Pages for a prompt and `reserve` positions more; None and no change if too few are left.

        What is known of the prompt is reused, all but its last token at most: there is always one
        to compute, whose logits choose the next. Full pages are shared; where the reused tokens end
        inside a page, its start is taken by a copy. Every position from `reused` on lies in a page
        of the request's own.

        Args:
            with_context: only what has drafter context too is reused.
        """
        needed = self._count(len(tokens) + reserve)
        found = self._index.match(tokens[:-1])
        if with_context:
            found = self._index.up_to_context(found)
        if found.extra < self._least_copy:
            found = found._replace(source=None, extra=0)
        sources = [] if found.source is None else [found.source]
        if not self._can_take(needed - len(found.pages), [*found.pages, *sources]):
            # A copy needs its source beside the pages of the request: one that must fill the pool
            # computes these few tokens.
            found, sources = found._replace(source=None, extra=0), []
            if not self._can_take(needed - len(found.pages), found.pages):
                return None
        for page in [*found.pages, *sources]:
            self._hold(page)
        own = [self._take() for _ in range(needed - len(found.pages))]
        reused = len(found.pages) * self.page_size + found.extra
        context_reused = self._index.with_context(found)
        self.hits += reused > 0
        self.hit_tokens += reused
        return Lease(
            pages=found.pages + own,
            reused=reused,
            context_reused=context_reused,
            copies=[(source, own[0]) for source in sources],
            committed=reused,
            content=found.content,
            has_context=context_reused == reused,
        )

    def commit(self, lease: Lease, tokens: Sequence[int], *, with_context: bool = False) -> None:
        """Says which tokens the lease's positions 0 … len(tokens) - 1 hold; full pages are shared.

        To be called with the whole sequence, of which only what is new is looked at, and only with
        tokens whose K/V is written: the anchor has none yet.

        Args:
            with_context: the new ones have drafter context too. It counts for others only where
                everything before them has it: what is drafted from a tail alone is not shared.
        """
        self._let_go(source for source, _ in lease.copies)
        lease.copies.clear()
        while lease.committed < len(tokens):
            index = lease.committed // self.page_size
            start, end = index * self.page_size, (index + 1) * self.page_size
            lease.has_context &= with_context
            lease.committed = min(end, len(tokens))
            if lease.committed == end and self._reuse:
                lease.content = self._index.file(
                    lease.pages[index],
                    lease.content,
                    tuple(tokens[start:end]),
                    has_context=lease.has_context,
                )

    def release(self, lease: Lease) -> None:
        """Gives all pages back, at any moment: full pages of committed tokens stay cached.

        The last page goes first, so that no page is evicted before those that continue it. A second
        call does nothing.
        """
        self._let_go(source for source, _ in lease.copies)
        lease.copies.clear()
        self._let_go(reversed(lease.pages))
        lease.pages.clear()

    def discard(self, lease: Lease) -> list[int]:
        """Gives all pages back and forgets what this request wrote: its numbers are wrong.

        Returns:
            Its own pages that nobody else holds, all of them free now.
        """
        own = lease.pages[lease.reused // self.page_size :]
        self.release(lease)
        gone = [page for page in own if not self._pages[page].references]
        for page in gone:
            content = self._pages[page].content
            if content is not None:
                # Whoever held a continuation of this page alone would hold it too.
                if len(content.pages) == 1:
                    self._forget_below(content)
                self._forget(page)
        return gone

    def _forget_below(self, content: Content) -> None:
        for child in list(content.children.values()):
            self._forget_below(child)
            for page in list(child.pages):
                self._forget(page)

    def _count(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def _can_take(self, count: int, held: Sequence[int]) -> bool:
        """Whether `count` pages can be taken, those of `held` left alone."""
        return count <= self.free + self.cached - sum(page in self._cached for page in held)

    def _hold(self, page: int) -> None:
        self._cached.pop(page, None)
        self._pages[page].references += 1

    def _take(self) -> int:
        """A page for one request alone; the least recently used one is evicted if none is free."""
        if not self._free:
            oldest = next(iter(self._cached))
            self._forget(oldest)
            self.evictions += 1
        page = self._free.pop()
        self._pages[page].references = 1
        return page

    def _let_go(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._pages[page].references -= 1
            if not self._pages[page].references:
                self._retire(page)

    def _retire(self, page: int) -> None:
        """Caches the page that was just let go, or frees it."""
        content = self._pages[page].content
        if content is None:
            self._free.append(page)
            return
        best = self._index.best(content)
        for other in list(content.pages):
            if other != best and not self._pages[other].references:
                self._forget(other)
        if not self._pages[best].references:
            self._cached.pop(best, None)
            self._cached[best] = None

    def _forget(self, page: int) -> None:
        """Frees a page that nobody holds; what it held is known no more."""
        self._index.drop(page)
        self._cached.pop(page, None)
        self._free.append(page)
