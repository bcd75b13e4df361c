"""The suffix automaton against brute force over the whole text, and what it costs to grow.

The oracle tries every suffix, longest first, at every earlier place; steps are lines that run,
counted by the interpreter's own trace hook.
"""

import ast
import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decoding import suffix
from dflash_jax.decoding.suffix import SuffixAutomaton


def matches(text: Sequence[int]) -> tuple[int, set[int]]:
    """Length of the longest suffix that also ends earlier, and all the places where it does."""
    text = list(text)
    for length in range(len(text) - 1, 0, -1):
        own = text[-length:]
        ends = {e for e in range(length - 1, len(text) - 1) if text[e - length + 1 : e + 1] == own}
        if ends:
            return length, ends
    return 0, set()


def check(text: Sequence[int]) -> None:
    """After every token: the longest match, at a place where it is, and what follows there."""
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        automaton.extend(token)
        so_far = list(text[:count])
        length, ends = matches(so_far)
        assert automaton.tokens == so_far
        assert automaton.match_length == length
        if length == 0:
            assert automaton.match_end == -1 and automaton.propose(4) == []
            continue
        assert automaton.match_end in ends
        grown = list(so_far)
        for proposed in automaton.propose(4):
            assert proposed == grown[automaton.match_end + 1 + len(grown) - count]
            grown.append(proposed)
        assert len(grown) == count + 4


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), max_size=40)))
def test_the_match_is_the_longest_there_is_and_drafts_are_what_followed_it(text):
    check(text)


@pytest.mark.parametrize("seed", range(3))
def test_texts_that_copy_pieces_of_themselves_are_matched_too(seed: int):
    """Random texts seldom have long matches, so that transitions are rarely copied in them."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 8).tolist()
    while len(text) < 90:
        start, size = rng.integers(0, len(text)), rng.integers(1, 20)
        text += [*text[start : start + size], int(rng.integers(0, 5))]
    check(text)


def test_nothing_is_proposed_before_a_token_has_come_twice():
    automaton = SuffixAutomaton()
    assert (automaton.match_length, automaton.propose(7)) == (0, [])
    for token in range(5):
        automaton.extend(token)
        assert (automaton.match_length, automaton.propose(7)) == (0, [])
    assert SuffixAutomaton(range(5)).tokens == automaton.tokens == list(range(5))


def test_a_loop_is_proposed_at_full_length():
    """abcabcab: the match abcab ended three tokens ago; c and then the loop itself follow."""
    a, b, c = 7, 8, 9
    automaton = SuffixAutomaton([a, b, c, a, b, c, a, b])
    assert automaton.match_length == 5
    assert automaton.propose(7) == [c, a, b, c, a, b, c]
    assert SuffixAutomaton([a] * 3).propose(5) == [a] * 5
    assert automaton.propose(1) == [c] and automaton.propose(0) == []


def test_the_continuation_goes_on_through_what_it_proposed():
    assert SuffixAutomaton([9, 1, 2, 3, 1, 2]).propose(4) == [3, 1, 2, 3]


def test_of_several_matches_a_later_one_is_followed():
    automaton = SuffixAutomaton([1, 2, 50, 1, 2, 60, 1, 2])
    assert automaton.match_length == 2
    assert automaton.propose(1) == [60]


def test_a_text_is_not_shared_with_who_gave_it():
    text = [1, 2, 1]
    automaton = SuffixAutomaton(text)
    automaton.extend(2)
    assert text == [1, 2, 1] and automaton.propose(2) == [1, 2]


def fibonacci(count: int) -> list[int]:
    """A text that repeats itself as much as a text without period can."""
    old, new = [0], [0, 1]
    while len(new) < count:
        old, new = new, new + old
    return new[:count]


TEXTS = {
    "one letter": lambda n: [0] * n,
    "one letter, then another": lambda n: [0] * (n // 2) + [1] * (n - n // 2),
    "a run cut again and again": lambda n: ([0] * (n // 4) + [1]) * 4,
    "a loop": lambda n: [i % 37 for i in range(n)],
    "fibonacci": fibonacci,
    "two letters": lambda n: np.random.default_rng(0).integers(0, 2, n).tolist(),
    "a vocabulary": lambda n: np.random.default_rng(0).integers(0, 5000, n).tolist(),
    # The most states and transitions that a text of its length can have.
    "abbb…": lambda n: [0] + [1] * (n - 1),
    "abbb…c": lambda n: [0] + [1] * (n - 2) + [2],
}


def lines_run(text: Sequence[int]) -> tuple[int, int]:
    """Lines of the module that run while a text is taken in: in all, and most for one token."""
    source, counts = suffix.__file__, [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        counts[-1] += event == "line"
        return trace if frame.f_code.co_filename == source else None

    automaton, before = SuffixAutomaton(), sys.gettrace()
    for token in text:
        counts.append(0)
        sys.settrace(trace)
        automaton.extend(token)
        sys.settrace(before)
    return sum(counts), max(counts)


@pytest.mark.parametrize("name", TEXTS)
def test_growing_costs_a_constant_number_of_steps_per_token(name: str):
    """Twice the text, twice the steps; and never more than a few dozen lines a token."""
    short, _ = lines_run(TEXTS[name](1000))
    long, _ = lines_run(TEXTS[name](2000))
    assert 1000 < short < 50 * 1000
    assert long < 2.2 * short


def test_steps_are_counted_here_where_they_are_many():
    """One token may cost a walk through the whole text; only the sum is bounded."""
    total, worst = lines_run(TEXTS["one letter, then another"](2000))
    assert worst > 1000 and total < 50 * 2000


@pytest.mark.parametrize("name", TEXTS)
def test_states_and_transitions_stay_within_the_known_bounds(name: str):
    """At most 2n - 1 states and 3n - 4 transitions (n >= 3): a copied transition is one of them."""
    text = TEXTS[name](600)
    automaton = SuffixAutomaton(text)
    assert len(automaton._length) <= 2 * len(text) - 1
    assert sum(map(len, automaton._next)) <= 3 * len(text) - 4


def test_the_automaton_is_plain_python():
    tree = ast.parse(inspect.getsource(suffix))
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imported] == ["from collections.abc import Iterable"]
