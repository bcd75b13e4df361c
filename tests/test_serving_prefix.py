"""The prefix index against brute force over plain lists, its size, and what its calls cost.

The oracle keeps each slot's tokens and the order of touches in two dictionaries. Cost is lines that
run in the module, counted by the interpreter's own trace hook.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_jax.serving import prefix
from dflash_jax.serving.prefix import Match, PrefixIndex

SLOTS = range(5)
slots = st.sampled_from(SLOTS)
few_tokens = st.lists(st.integers(0, 1), max_size=7)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    return max(n for n in range(min(len(one), len(other)) + 1) if one[:n] == other[:n])


def count_nodes(index: PrefixIndex) -> int:
    """Size of the tree, in which every node but the root is a slot's end or a fork."""
    nodes = [index._root]
    for node in nodes:
        assert node is index._root or node.slots or len(node.children) > 1
        nodes += node.children.values()
    return len(nodes)


class AgainstBruteForce(RuleBasedStateMachine):
    """Any calls in any order: every answer is what plain lists say."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.tokens: dict[int, list[int]] = {}
        self.touched: list[int] = []  # latest last

    def note_touch(self, slot: int) -> None:
        self.touched = [other for other in self.touched if other != slot]
        if slot in self.tokens:
            self.touched.append(slot)

    @rule(slot=slots, tokens=few_tokens)
    def put(self, slot: int, tokens: list[int]) -> None:
        self.index.put(slot, tokens)
        self.tokens.pop(slot, None)
        if tokens:
            self.tokens[slot] = list(tokens)
        self.note_touch(slot)

    @rule(slot=slots, new=few_tokens, whole=st.booleans())
    def extend(self, slot: int, new: list[int], whole: bool) -> None:
        if slot not in self.tokens:
            return
        self.tokens[slot] = self.tokens[slot] + new
        if whole:
            self.index.put(slot, self.tokens[slot])
        else:
            self.index.extend(slot, new)
        self.note_touch(slot)

    @rule(slot=slots, other=slots, length=st.integers(0, 7))
    def put_the_start_of(self, slot: int, other: int, length: int) -> None:
        """The same slot is cut short, another one comes to lie on the same path."""
        self.put(slot, self.tokens.get(other, [])[:length])

    @rule(slot=slots)
    def drop(self, slot: int) -> None:
        self.index.drop(slot)
        self.tokens.pop(slot, None)
        self.note_touch(slot)

    @rule(slot=slots)
    def touch(self, slot: int) -> None:
        self.index.touch(slot)
        self.note_touch(slot)

    @rule(wanted=st.lists(st.integers(0, 1), max_size=12))
    def longest(self, wanted: list[int]) -> None:
        lengths = {slot: shared_length(held, wanted) for slot, held in self.tokens.items()}
        best = max(lengths.values(), default=0)
        alike = [slot for slot in self.touched if lengths[slot] == best]
        expected = Match(alike[-1], best) if best else Match(None, 0)
        assert self.index.longest(wanted) == expected
        assert self.index.longest(tuple(wanted)) == expected

    @rule(some=st.sets(slots, min_size=1))
    def least_recent(self, some: set[int]) -> None:
        order = [slot for slot in SLOTS if slot not in self.tokens] + self.touched
        assert self.index.least_recent(some) == min(some, key=order.index)

    @invariant()
    def each_slot_holds_what_it_was_given(self) -> None:
        for slot in SLOTS:
            assert self.index.held(slot) == len(self.tokens.get(slot, []))
        for tokens in self.tokens.values():
            assert self.index.longest(tokens).length == len(tokens)

    @invariant()
    def nodes_are_bounded_by_slots(self) -> None:
        assert count_nodes(self.index) <= max(2 * len(self.tokens), 1)


AgainstBruteForce.TestCase.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=30, derandomize=True
)
test_any_calls_in_any_order_answer_as_brute_force = AgainstBruteForce.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_walk_of_calls_answers_as_brute_force(seed: int):
    """Longer than what hypothesis draws, so that paths fork, grow and close many times."""
    draw, machine = random.Random(seed), AgainstBruteForce()

    def tokens() -> list[int]:
        return draw.choices([0, 0, 0, 1], k=draw.randrange(8))

    for _ in range(2000):
        slot, other = draw.choices(SLOTS, k=2)
        step = draw.choice("put extend extend start start drop touch".split())
        if step == "put":
            machine.put(slot, tokens())
        elif step == "extend":
            machine.extend(slot, tokens()[:3], draw.random() < 0.5)
        elif step == "start":
            machine.put_the_start_of(slot, other, draw.randrange(1, 8))
        elif step == "drop":
            machine.drop(slot)
        else:
            machine.touch(slot)
        machine.longest(tokens() + tokens())
        machine.least_recent({slot, other})
        machine.each_slot_holds_what_it_was_given()
        machine.nodes_are_bounded_by_slots()


def test_the_slot_with_the_longest_common_prefix_is_found():
    index = PrefixIndex()
    assert index.longest([1, 2]) == Match(None, 0)
    index.put(3, [1, 2, 3, 4])
    index.put(5, [1, 2, 9])
    assert index.longest([1, 2, 9, 9]) == Match(5, 3)
    assert index.longest([1, 2, 3, 4, 5]) == Match(3, 4)
    assert index.longest([2, 1]) == index.longest([]) == Match(None, 0)


def test_of_slots_that_share_the_same_length_the_last_touched_is_found():
    index = PrefixIndex()
    for slot in (0, 1, 2):
        index.put(slot, [7, 7, slot])
    assert index.longest([7, 7, 50]) == Match(2, 2)
    index.touch(0)
    assert index.longest([7, 7, 50]) == Match(0, 2)
    index.extend(1, [8])
    assert index.longest([7, 7, 50]) == Match(1, 2)
    index.drop(1)
    assert index.longest([7, 7, 50]) == Match(0, 2)


def test_empty_slots_are_given_up_first_then_the_least_recent():
    index = PrefixIndex()
    for slot in (3, 1, 2):
        index.put(slot, [slot])
    assert index.least_recent([1, 2, 3, 4, 0]) == 0
    assert index.least_recent([1, 2, 3]) == 3
    index.touch(3)
    assert index.least_recent(iter([1, 2, 3])) == 1
    index.drop(2)
    assert index.least_recent([1, 2, 3]) == 2


def test_tokens_are_not_shared_with_who_gave_them():
    tokens = [1, 2]
    index = PrefixIndex()
    index.put(0, tokens)
    index.extend(0, [3])
    tokens.append(4)
    assert index.longest([1, 2, 3]) == Match(0, 3)
    assert index.longest([1, 2, 4]) == Match(0, 2)


def test_a_slot_that_holds_nothing_cannot_grow():
    with pytest.raises(KeyError):
        PrefixIndex().extend(0, [1])


def lines_run(call: Callable[..., object], *arguments: object) -> int:
    """Lines of the module that run during a call."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == prefix.__file__ else None

    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return count


def test_growing_costs_the_new_tokens_whatever_the_slot_holds():
    """Alone, and beside a slot that shares it all: then it leaves the other's path."""
    costs = []
    for held in (50, 5000):
        alone, beside = PrefixIndex(), PrefixIndex()
        alone.put(0, range(held))
        beside.put(1, range(held + 500))
        beside.put(0, range(held))
        steps = [[held], [held + 1], [-1], [-2]]
        costs.append(
            [lines_run(index.extend, 0, new) for index in (alone, beside) for new in steps]
        )
        assert alone.held(0) == beside.held(0) == held + 4
        assert beside.longest(range(held + 500)) == Match(1, held + 500)
    assert costs[0] == costs[1]
    assert 0 < max(costs[0]) < 100


def test_putting_the_grown_sequence_costs_no_more_than_extending():
    """`put` compares what is held in one list comparison."""
    costs = []
    for held in (50, 5000):
        index = PrefixIndex()
        index.put(0, range(held))
        costs.append(lines_run(index.put, 0, range(held + 1)))
    assert costs[0] == costs[1] < 100


def test_looking_up_costs_the_prompt_whatever_the_slots_hold():
    costs = []
    for held, count in ((200, 2), (4000, 60)):
        index = PrefixIndex()
        for slot in range(count):
            index.put(slot, [*range(100), slot, *range(held)])
        costs.append(lines_run(index.longest, [*range(100), 1, *range(50)]))
    assert costs[0] == costs[1] < 4 * 151


def test_the_index_imports_no_jax():
    code = "import sys, dflash_jax.serving.prefix; sys.exit('jax' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
