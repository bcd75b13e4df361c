"""StopStrings against `str.find` on the whole text, at every way of cutting it into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.serving.stop_strings import StopStrings


def handed_out(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What each push gives, up to the one that finds a stop string."""
    matcher, given_out = StopStrings(stops), []
    for piece in pieces:
        given_out.append(matcher.push(piece))
        if matcher.found:
            break
    return given_out, matcher.found


def test_text_that_may_begin_a_stop_string_waits_until_it_is_decided():
    pieces, found = handed_out(["END", "NOT"], ["the E", "N", "O", "X"])
    assert pieces == ["the ", "", "E", "NOX"]
    assert not found


def test_a_stop_string_over_three_pieces_is_found_and_not_handed_out():
    pieces, found = handed_out(["STOP"], ["a S", "TO", "P b", "never pushed"])
    assert pieces == ["a ", "", ""]
    assert found


def test_of_two_that_end_in_one_piece_the_one_that_begins_first_counts():
    assert handed_out(["c", "bcd"], ["abcde"]) == (["a"], True)
    assert handed_out(["cd", "abcdefg"], ["xabcde"]) == (["xab"], True)


def test_of_two_that_end_in_different_pieces_the_one_that_ends_first_counts():
    assert handed_out(["c", "bcd"], ["ab", "c", "d"]) == (["a", "b"], True)


def test_what_was_held_back_is_there_at_the_end():
    matcher = StopStrings(["abcd"])
    assert matcher.push("xxabc") == "xx"
    assert (matcher.decided, matcher.seen) == (2, 5)
    assert matcher.finish() == "abc"
    assert (matcher.decided, matcher.seen) == (5, 5)


def test_a_stop_string_that_begins_too_early_is_none_and_one_inside_it_may_still_be():
    matcher = StopStrings(["aba"])
    assert matcher.push("xaba", earliest=2) == "xab"
    assert not matcher.found
    assert matcher.push("ba", earliest=2) == ""
    assert matcher.found and matcher.decided == 3


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
@settings(max_examples=500, deadline=None)
def test_every_piece_is_all_that_is_certain_and_nothing_more(text, stops, sizes):
    """The oracle looks at the whole text so far, every time."""
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    matcher, seen, out = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        out += matcher.push(piece)
        starts = [seen.find(stop) for stop in stops if stop in seen]
        assert matcher.found == bool(starts)
        if starts:
            assert out == seen[: min(starts)]
            return
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
        held = max((len(b) for b in beginnings if seen.endswith(b)), default=0)
        assert out == seen[: len(seen) - held]


class Counting(str):
    """Counts how often its characters are looked at."""

    looks = 0

    def __getitem__(self, key):
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("stop", ["a" * 500 + "b", "ab" * 250 + "c"])
def test_the_work_grows_with_the_text_and_not_with_the_stop_string(stop):
    """A text that all but matches, character by character."""
    counting = Counting(stop)
    matcher, text = StopStrings([counting]), stop[:2] * 1000
    for character in text:
        matcher.push(character)
    assert not matcher.found and matcher.seen == len(text)
    assert counting.looks <= 3 * (len(text) + len(stop))
