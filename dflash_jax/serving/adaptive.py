"""Whether drafting pays at this load, from measured rounds: `ServeConfig.adaptive`.

A drafting round of n rows costs more than a plain one and commits more. Both costs depend on n and
on the machine, the commits on the text; so both are measured while serving, and the cheaper way per
token is taken. Host arithmetic only; the text never depends on it.
"""

import dataclasses
import logging

logger = logging.getLogger(__name__)

# The latest rounds decide: a weight of 1/8 forgets a text within a few dozen rounds.
WEIGHT = 1 / 8
# The way not taken is measured again this often, which costs at most a thirtieth.
PROBE_EVERY = 32
# Rounds of each way before a choice is made.
LEAST_ROUNDS = 4


@dataclasses.dataclass
class _Way:
    """One way of decoding n rows: seconds and tokens of a round, exponentially averaged."""

    seconds: float = 0.0
    tokens: float = 0.0
    rounds: int = 0

    def observe(self, seconds: float, tokens: float) -> None:
        self.rounds += 1
        weight = max(WEIGHT, 1 / self.rounds)
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (tokens - self.tokens)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else float("inf")


class AdaptiveDrafting:
    """Chooses between drafting and plain rounds, apart for every number of rows."""

    def __init__(self) -> None:
        self._ways: dict[tuple[int, bool], _Way] = {}
        self._chosen: dict[int, bool] = {}
        self._rounds: dict[int, int] = {}

    def plain(self, rows: int) -> bool:
        """Whether the next round of `rows` rows should go without drafts."""
        count = self._rounds[rows] = self._rounds.get(rows, 0) + 1
        drafting, plain = self._way(rows, False), self._way(rows, True)
        if drafting.rounds < LEAST_ROUNDS:
            return False
        if plain.rounds < LEAST_ROUNDS:
            return True
        chosen = self._chosen.get(rows, False)
        return not chosen if count % PROBE_EVERY == 0 else chosen

    def observe(self, rows: int, plain: bool, seconds: float, tokens: int) -> str | None:
        """Takes in a round; says so when it changes the choice."""
        self._way(rows, plain).observe(seconds, float(tokens))
        ways = self._way(rows, False), self._way(rows, True)
        if min(way.rounds for way in ways) < LEAST_ROUNDS:
            return None
        best = ways[1].seconds_per_token < ways[0].seconds_per_token
        if best == self._chosen.get(rows, False):
            return None
        self._chosen[rows] = best
        note = (
            f"{'no drafting' if best else 'drafting'} at {rows} rows: "
            f"{1e3 * ways[0].seconds_per_token:.2f} ms a token with drafts, "
            f"{1e3 * ways[1].seconds_per_token:.2f} ms without"
        )
        logger.info("adaptive: %s", note)
        return note

    def _way(self, rows: int, plain: bool) -> _Way:
        return self._ways.setdefault((rows, plain), _Way())
