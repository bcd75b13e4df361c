"""Rounds of an engine's rows: how wide the next one is, its dispatch, and what it gave to whom.

Between `batch.py`, which says who decodes, and `engine.py`, which runs what was compiled. A round
is on its way (`flight.py`) until it is read; at most two are, while rounds follow each other before
their tokens are known.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from dflash_jax.decoding.report import NOT_RUN, RoundReport
from dflash_jax.serving.adaptive import AdaptiveDrafting
from dflash_jax.serving.counters import Counters
from dflash_jax.serving.drafting import host_drafts, note_drafting
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.flight import Flight, LastRound, may_follow, note_round, weigh
from dflash_jax.serving.row import Row


class Rounds:
    """Dispatches rounds and reads them.

    Attributes:
        flight: the latest round that was dispatched and not read.
        adaptive: chooses the width of rounds that draft; None: it is always K.
        last: the latest round of each slot.
    """

    def __init__(self, engine: Engine, counters: Counters):
        config = engine.config
        self.engine, self.counters = engine, counters
        self.flight: Flight | None = None
        self.adaptive = None
        if config.adaptive and config.speculation != "none":
            self.adaptive = AdaptiveDrafting({config.max_draft_len, config.narrow_draft_len, 0})
        self.last: dict[int, LastRound] = {}

    def dispatch(self, rows: list[Row]) -> None:
        """Starts a round of these rows; nobody waits for it."""
        config = self.engine.config
        slots = [row.slot for row in rows if row.slot is not None]
        active = [slot in slots for slot in range(max(slots) + 1)]
        drafts = host_drafts(rows, config.max_draft_len) if config.speculation == "suffix" else None
        drafting = [row for row in rows if row.params.speculate]
        width = config.max_draft_len if drafting and drafts != {} else 0
        if self.adaptive is not None and width:
            width = self.adaptive.width(len(rows))
        packed = self.engine.start_round(
            active,
            general=any(not row.greedy for row in rows),
            plain=not width,
            narrow=self._narrow(width),
            drafts=drafts,
        )
        self.flight = Flight(rows, slots, packed, width, time.monotonic())

    def may_follow(self, running: Iterable[Row]) -> bool:
        """Whether the next round can be dispatched before this one's tokens are known."""
        config = self.engine.config
        if self.flight is None or config.speculation == "suffix" or self.adaptive is not None:
            return False
        return may_follow(self.flight, running, config.rounds_per_step)

    def wait(self, flight: Flight) -> list[RoundReport]:
        """One report for each round of the dispatch."""
        width = flight.draft_len
        return self.engine.read_round(flight.packed, plain=not width, narrow=self._narrow(width))

    def results(
        self, flight: Flight, reports: Sequence[RoundReport]
    ) -> Iterator[tuple[Row, RoundReport, int]]:
        """(row, report, slot) of every row's rounds; what is yielded must be delivered at once.

        A row that a delivery ends gets nothing of the later rounds.
        """
        for report in reports:
            for row, slot in zip(flight.rows, flight.slots, strict=True):
                if row.finish_reason is None and report.num_accepted_drafts[slot] != NOT_RUN:
                    self._note(row, slot, report, plain=not flight.draft_len)
                    yield row, report, slot
        if self.adaptive is not None:
            weigh(self.adaptive, flight, reports)

    def moved(self, source: int, target: int) -> None:
        """A row has another slot now."""
        self.last.pop(target, None)
        if source in self.last:
            self.last[target] = self.last.pop(source)

    def _narrow(self, width: int) -> bool:
        return 0 < width < self.engine.config.max_draft_len

    def _note(self, row: Row, slot: int, report: RoundReport, *, plain: bool) -> None:
        last = self.last[slot] = note_round(row, slot, report)
        drafted = len(last.drafts)
        self.counters.round(drafted, last.num_accepted_drafts)
        if not plain:
            note_drafting(row, drafted, self.engine.config.drafter)
