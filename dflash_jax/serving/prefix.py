"""Which slot still holds which tokens: a radix tree over slots, for prefix reuse.

Host state in plain Python, nothing of JAX. The tree says what a slot's rows hold, never whether the
slot is in use: whoever admits requests drops a slot here before others write into it. Pages that
requests share are `pages.py`'s.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """The slot that shares the most leading tokens, and how many; `Match(None, 0)` for none."""

    slot: int | None
    length: int


@dataclasses.dataclass(eq=False)
class _Node:
    """A place in the tree where a slot's tokens end or where slots part.

    Attributes:
        end: tokens from the root to here. Those of the edge from the parent are the tokens
            `parent.end … end` of any slot below, so no node keeps tokens of its own.
        latest: the most recently touched slot that ends here or below; the root has none.
        children: by the first token of their edges.
        slots: those that end exactly here.
    """

    parent: "_Node | None"
    end: int
    latest: int = -1
    children: "dict[int, _Node]" = dataclasses.field(default_factory=dict)
    slots: set[int] = dataclasses.field(default_factory=set)


class PrefixIndex:
    """The token sequences of slots, one each, found by their longest common prefix.

    A node is the root, the end of a slot or a fork, so n slots make at most 2n of them. `put` and
    `extend` touch the slot.
    """

    def __init__(self):
        self._root = _Node(None, 0)
        self._tokens: dict[int, list[int]] = {}
        self._nodes: dict[int, _Node] = {}
        self._touched: dict[int, int] = {}
        self._clock = itertools.count()

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot holds K/V of exactly these tokens now, whatever it held before."""
        held = self._tokens.get(slot, [])
        if held and held == list(tokens[: len(held)]):
            self.extend(slot, tokens[len(held) :])
            return
        self.drop(slot)
        if len(tokens):
            self._tokens[slot] = list(tokens)
            self._insert(slot, self._root)

    def extend(self, slot: int, new: Sequence[int]) -> None:
        """The slot holds these tokens too, after the others; O(new tokens).

        Raises:
            KeyError: the slot holds nothing.
        """
        self._tokens[slot] += new
        node = self._nodes[slot]
        if node.children or len(node.slots) > 1:
            node.slots.remove(slot)
            self._insert(slot, node)
            self._join(node)
        else:
            node.end = len(self._tokens[slot])
            self.touch(slot)

    def drop(self, slot: int) -> None:
        """The slot holds nothing any more."""
        if slot not in self._tokens:
            return
        node = self._nodes.pop(slot)
        node.slots.remove(slot)
        parent = node.parent
        if parent is not None and not node.slots and not node.children:
            del parent.children[self._tokens[slot][parent.end]]
            node = parent
        del self._tokens[slot], self._touched[slot]
        self._join(node)
        # Who is not the latest of a node is not the latest of its parent either.
        while node.parent is not None and node.latest == slot:
            below = [*node.slots, *(child.latest for child in node.children.values())]
            node.latest = max(below, key=self._touched.__getitem__)
            node = node.parent

    def held(self, slot: int) -> int:
        """Number of tokens that the slot holds."""
        return len(self._tokens.get(slot, ()))

    def longest(self, tokens: Sequence[int]) -> Match:
        """The slot that shares the longest prefix, the most recently touched of equals; O(tokens).

        It may hold more than that, or no more than a part of `tokens`.
        """
        node, slot, length = self._root, None, 0
        while length == node.end and length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            node, slot = child, child.latest
            length = _parting(tokens, self._tokens[slot], length, min(node.end, len(tokens)))
        return Match(slot, length)

    def touch(self, slot: int) -> None:
        """The slot was used now; nothing happens for one that holds nothing."""
        if slot not in self._tokens:
            return
        self._touched[slot] = next(self._clock)
        node = self._nodes[slot]
        while node.parent is not None:
            node.latest = slot
            node = node.parent

    def least_recent(self, slots: Iterable[int]) -> int:
        """Whose tokens to give up first: the lowest slot that holds nothing, else the oldest."""
        return min(slots, key=lambda slot: (self._touched.get(slot, -1), slot))

    def _insert(self, slot: int, node: _Node) -> None:
        """Hangs the slot below `node`, whose tokens it starts with."""
        tokens = self._tokens[slot]
        while node.end < len(tokens):
            first = tokens[node.end]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _Node(node, len(tokens), slot)
            stop = min(child.end, len(tokens))
            shared = _parting(tokens, self._tokens[child.latest], node.end, stop)
            node = child if shared == child.end else self._split(child, shared)
        node.slots.add(slot)
        self._nodes[slot] = node
        self.touch(slot)

    def _split(self, node: _Node, end: int) -> _Node:
        """A new node on the edge to `node`, `end` tokens from the root."""
        upper = self._hang(_Node(node.parent, end, node.latest))
        node.parent = upper
        self._hang(node)
        return upper

    def _join(self, node: _Node) -> None:
        """Takes out a node that is neither an end nor a fork."""
        if node.parent is not None and not node.slots and len(node.children) == 1:
            (child,) = node.children.values()
            child.parent = node.parent
            self._hang(child)

    def _hang(self, node: _Node) -> _Node:
        assert node.parent is not None
        node.parent.children[self._tokens[node.latest][node.parent.end]] = node
        return node


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    return _parting(one, other, 0, min(len(one), len(other)))


def _parting(one: Sequence[int], other: Sequence[int], start: int, stop: int) -> int:
    """First position from `start` on where both differ; `stop` where none before it does."""
    return next((i for i in range(start, stop) if one[i] != other[i]), stop)
