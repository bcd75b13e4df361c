"""Which page of a pool holds which tokens: a tree of full pages, and what is known of a prompt.

Host state in plain Python. Who holds a page, which are free and which are given up is `pages.py`'s
business; only full pages of committed tokens get in here.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


@dataclasses.dataclass(eq=False)
class Content:
    """The tokens of one full page after all those of its parents; the root is the empty prefix.

    K/V of a token depends on every token before it, so content is a path from the root. A child is
    found by its tokens, a dictionary's hash and then an equality check, under a parent that was
    found the same way: no hash stands for tokens anywhere.

    Attributes:
        pages: that hold it; more than one where requests computed the same tokens side by side.
            Never empty but in the root: parents outlive their children (`PagePool.release`).
    """

    parent: "Content | None" = None
    tokens: tuple[int, ...] = ()
    children: "dict[tuple[int, ...], Content]" = dataclasses.field(default_factory=dict)
    pages: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Page:
    """What the pool knows of one page.

    Attributes:
        references: leases that hold it.
        content: once it is full of committed tokens.
        has_context: drafter context is there for its tokens, and was for all tokens before them.
    """

    references: int = 0
    content: Content | None = None
    has_context: bool = False


class Found(NamedTuple):
    """The longest known start of a prompt: full pages, then `extra` tokens of page `source`."""

    pages: list[int]
    content: Content
    source: int | None
    extra: int


class PageIndex:
    """Finds pages by the tokens that they hold.

    Attributes:
        pages: by id; who holds them is noted by the pool.
        root: the empty prefix.
    """

    def __init__(self, num_pages: int, page_size: int):
        self._page_size = page_size
        self.pages = [Page() for _ in range(num_pages)]
        self.root = Content()

    def match(self, tokens: Sequence[int]) -> Found:
        """What is known of a prompt."""
        content, pages, size = self.root, [], self._page_size
        for start in range(0, len(tokens), size):
            rest = tuple(tokens[start : start + size])
            child = content.children.get(rest)
            if child is None:
                return Found(pages, content, *self._match_start(content, rest))
            content = child
            pages.append(self.best(child))
        return Found(pages, content, None, 0)

    def _match_start(self, content: Content, rest: tuple[int, ...]) -> tuple[int | None, int]:
        """The page after `content` whose tokens start like `rest`, and how far."""
        starts = [
            (_common(child.tokens, rest), self.best(child))
            for child in content.children.values()
            if child.tokens[0] == rest[0]
        ]
        if not starts:
            return None, 0
        length, page = max(starts, key=lambda s: (s[0], self.pages[s[1]].has_context))
        return page, length

    def up_to_context(self, found: Found) -> Found:
        """The prefix up to the first page without context."""
        for index, page in enumerate(found.pages):
            if not self.pages[page].has_context:
                content = self.pages[page].content
                assert content is not None and content.parent is not None
                return Found(found.pages[:index], content.parent, None, 0)
        if found.source is not None and not self.pages[found.source].has_context:
            return found._replace(source=None, extra=0)
        return found

    def with_context(self, found: Found) -> int:
        """Leading tokens of the prefix that have context, up to the first page without."""
        for index, page in enumerate(found.pages):
            if not self.pages[page].has_context:
                return index * self._page_size
        partial = found.source is not None and self.pages[found.source].has_context
        return len(found.pages) * self._page_size + (found.extra if partial else 0)

    def best(self, content: Content) -> int:
        """The page to share of those that hold the same: with context, if one has it."""
        return max(content.pages, key=lambda page: self.pages[page].has_context)

    def file(
        self, page: int, parent: Content, tokens: tuple[int, ...], *, has_context: bool
    ) -> Content:
        """Makes a full page known, as the continuation of `parent`; what it holds."""
        content = parent.children.setdefault(tokens, Content(parent, tokens))
        content.pages.append(page)
        self.pages[page].content, self.pages[page].has_context = content, has_context
        return content

    def drop(self, page: int) -> None:
        """Forgets what a page holds, and its content with the last page of it."""
        content = self.pages[page].content
        assert content is not None and content.parent is not None
        content.pages.remove(page)
        if not content.pages:
            del content.parent.children[content.tokens]
        self.pages[page] = Page()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that both share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
