"""How many drafts pay at this load, from measured rounds: `ServeConfig.adaptive`.

A round that verifies more drafts costs more and commits more. Its cost depends on the number of
rows and on the machine, what it commits on the text; both are measured while serving, and the
cheapest width per token is taken. Host arithmetic only; the text never depends on it.

With c(n, w) seconds of a round of n rows that verifies w drafts each, and a(i) the share of rows
that accept at least i drafts, a round commits n (1 + a(1) + … + a(w)) tokens (Leviathan et al.
2023, section 3.1, with measured shares in place of a constant one). A narrow round takes the
leading drafts of the same block, so that one measurement of a(i) serves every width.
"""

import dataclasses
import logging
from collections.abc import Collection, Sequence

logger = logging.getLogger(__name__)

# The latest rounds decide: a weight of 1/8 forgets a text within a few dozen rounds.
WEIGHT = 1 / 8
# A width that is not taken is measured again this often, which costs at most a thirtieth.
PROBE_EVERY = 32
# Rounds of each width before a choice is made.
LEAST_ROUNDS = 4


@dataclasses.dataclass
class _Mean:
    """An exponential average that begins as a plain one."""

    value: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += max(WEIGHT, 1 / self.count) * (value - self.value)


class _Load:
    """What is known of one number of rows: seconds of a round by width, acceptance by position."""

    def __init__(self, widths: Collection[int]):
        self.seconds = {width: _Mean() for width in widths}
        self.accepted = [_Mean() for _ in range(max(widths))]
        self.chosen, self.rounds = max(widths), 0

    def seconds_per_token(self, width: int) -> float:
        """Of one row's share of a round."""
        return self.seconds[width].value / (1 + sum(a.value for a in self.accepted[:width]))


class AdaptiveDrafting:
    """Chooses the drafts of a round, apart for every number of rows.

    Args:
        widths: drafts a row that rounds are compiled for, such as (7, 3, 0); 0 is plain.
    """

    def __init__(self, widths: Collection[int]):
        self._widths = sorted(widths, reverse=True)
        self._loads: dict[int, _Load] = {}

    def width(self, rows: int) -> int:
        """How many drafts the next round of `rows` rows should verify at most."""
        load = self._load(rows)
        load.rounds += 1
        for width in self._widths:
            if load.seconds[width].count < LEAST_ROUNDS:
                return width
        turn, rest = divmod(load.rounds, PROBE_EVERY)
        others = [width for width in self._widths if width != load.chosen]
        return load.chosen if rest or not others else others[turn % len(others)]

    def observe(self, rows: int, width: int, seconds: float, accepted: Sequence[int]) -> str | None:
        """Takes in a round; says so when it changes the choice.

        Args:
            seconds: that the round took.
            accepted: drafts that each row accepted, 0 … width.
        """
        load = self._load(rows)
        load.seconds[width].observe(seconds)
        for place in range(width if accepted else 0):
            share = sum(count > place for count in accepted) / len(accepted)
            load.accepted[place].observe(share)
        if min(mean.count for mean in load.seconds.values()) < LEAST_ROUNDS:
            return None
        best = min(self._widths, key=load.seconds_per_token)
        if best == load.chosen:
            return None
        load.chosen = best
        costs = ", ".join(
            f"{1e3 * load.seconds_per_token(width):.2f} ms with {width}" for width in self._widths
        )
        note = (
            f"{f'{best} drafts' if best else 'no drafting'} at {rows} rows: a token takes {costs}"
        )
        logger.info("adaptive: %s", note)
        return note

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault(rows, _Load(self._widths))
