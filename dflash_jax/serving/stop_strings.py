"""Finds the first stop string in a text that comes piece by piece, and holds back what may be one.

Characters only: which tokens go with a cut is decided in `output.py`, where they end by their ids
in `stopping.py`.
"""

from collections.abc import Sequence


class StopStrings:
    """The text of one answer on its way past its stop strings.

    What `push` returns is certain not to be part of one. Each string is followed by the automaton
    of Knuth, Morris and Pratt (1977), so that no character is looked at again and what is held
    back is exactly the longest end of the text that begins a stop string.

    Worked example, stop strings "END" and "NOT": push("the E") gives "the " and holds "E";
    push("N") holds "EN"; push("O") gives "E" and holds "NO", for "EN" was no "END".

    Attributes:
        found: whether one was found; the text ends before it and nothing more is pushed.
        decided: characters handed out so far, those that `push` is returning included.
    """

    def __init__(self, stops: Sequence[str]):
        self._followers = [_Follower(stop) for stop in stops]
        self._held = ""
        self.found = False
        self.decided = 0

    @property
    def seen(self) -> int:
        """Characters pushed so far."""
        return self.decided + len(self._held)

    def push(self, text: str, earliest: int = 0) -> str:
        """The text that has become certain with `text`, up to the first stop string in it.

        Of several that end in `text` the one that begins first counts.

        Args:
            earliest: a stop string that begins before this character is none.
        """
        starts = [follower.push(text, self.seen, earliest) for follower in self._followers]
        found = [start for start in starts if start is not None]
        self._held += text
        if found:
            self.found = True
            return self._release(min(found) - self.decided)
        longest = max(follower.matched for follower in self._followers)
        return self._release(len(self._held) - longest)

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.decided += count
        return text


class _Follower:
    """How much of one string the end of the text matches.

    Attributes:
        matched: characters of `stop`, fewer than all, that the text now ends with.
    """

    def __init__(self, stop: str):
        self._stop = stop
        self._borders = _borders(stop)
        self.matched = 0

    def push(self, text: str, seen: int, earliest: int) -> int | None:
        """Where the first match that ends in `text` begins; `text` begins at character `seen`."""
        for place, character in enumerate(text, seen + 1):
            self.matched = _advance(self._stop, self._borders, self.matched, character)
            if self.matched == len(self._stop):
                self.matched = self._borders[-1]
                if place - len(self._stop) >= earliest:
                    return place - len(self._stop)
        return None


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the longest shorter beginning that it also ends with.

    Worked example: "abab" gives [0, 0, 1, 2], for "abab" ends with "ab".
    """
    borders = [0]
    for character in stop[1:]:
        borders.append(_advance(stop, borders, borders[-1], character))
    return borders


def _advance(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    """Characters of `stop` that are matched after one more; `matched` is less than all of them."""
    while matched and stop[matched] != character:
        matched = borders[matched - 1]
    return matched + (stop[matched] == character)
