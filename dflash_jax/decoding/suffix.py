"""Drafts from a row's own text: what followed the longest earlier match of its present end.

Host code in plain Python, nothing of JAX: one automaton a row, extended token by token as the text
is committed. `given.py` takes the drafts into the compiled round, which verifies them as any other;
what is proposed here can cost time, never change the text.
"""

from collections.abc import Iterable


class SuffixAutomaton:
    """All substrings of a growing text, and where its longest repeated end was before.

    The online construction of Blumer et al., "The smallest automaton recognizing the subwords of a
    text" (1985): after n tokens at most 2n states and 3n transitions, built in O(n) steps in all
    (transitions are moved and copied, never removed, so copies count among the 3n).

    Attributes:
        tokens: the text so far.
        match_length: length of the longest suffix of the text that also ended earlier; 0 for none.
        match_end: index in the text where that earlier one ends; -1 for none.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self.match_length = 0
        self.match_end = -1
        # One entry a state; state 0 is the empty string, which has no suffix link.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]
        self._whole = 0
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Appends one token and finds the new longest match; amortised O(1)."""
        whole = self._state({}, self._length[self._whole] + 1, len(self.tokens))
        state = self._whole
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        self._whole = whole
        self.tokens.append(token)
        self._link[whole] = 0 if state == -1 else self._suffix_state(state, token)
        self._note_match(self._link[whole])

    def propose(self, max_draft_len: int) -> list[int]:
        """What followed the match, `max_draft_len` tokens; empty when there is no match.

        Where the continuation runs into the end of the text it goes on through the proposed tokens,
        as if the text since the match were a period: verifying costs the same at any count.

        Worked example: after [9, 1, 2, 3, 1, 2] the match [1, 2] ends at index 2, three tokens ago,
        so that four drafts are [3, 1, 2, 3].
        """
        if self.match_length == 0:
            return []
        start = self.match_end + 1
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(max_draft_len)]

    def _state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def _suffix_state(self, state: int, token: int) -> int:
        """The state whose longest string is `state`'s longest followed by `token`."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        # `found` holds longer strings too, which do not end here: the shorter ones move out.
        short = self._state(dict(self._next[found]), self._length[state] + 1, self._end[found])
        self._link[short], self._link[found] = self._link[found], short
        while state != -1 and self._next[state].get(token) == found:
            self._next[state][token] = short
            state = self._link[state]
        return short

    def _note_match(self, state: int) -> None:
        if self._length[state] == 0:
            self.match_length, self.match_end = 0, -1
            return
        self.match_length, self.match_end = self._length[state], self._end[state]
        # Matched again later, the nearer place is the better guess; keeping the very last end of
        # every suffix would cost O(n) a token.
        self._end[state] = len(self.tokens) - 1
