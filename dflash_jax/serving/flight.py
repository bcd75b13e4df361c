"""A round between its dispatch and its end: what is kept of it, and what the host makes of it."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

from dflash_jax.decoding.report import NOT_RUN, RoundReport
from dflash_jax.serving.adaptive import AdaptiveDrafting
from dflash_jax.serving.row import Row


class Flight(NamedTuple):
    """A dispatched round that has not been read."""

    rows: list[Row]
    slots: list[int]
    packed: jax.Array
    draft_len: int
    started: float


class LastRound(NamedTuple):
    """A slot's latest round, for tests and ablations; ids as the target and drafter chose them."""

    drafts: list[int]
    num_accepted_drafts: int
    chosen: list[int]


def may_follow(flight: Flight, running: Iterable[Row], num_rounds: int) -> bool:
    """Whether the same rows can run `num_rounds` rounds more before this one's tokens are known.

    Nothing but this round's rows may be about to run. A row that ends in the meantime does
    not advance (`TokenState.remaining`); one that a stop string ends costs a round for nothing.
    """
    if any(row not in flight.rows for row in running):
        return False
    if [row.slot for row in flight.rows] != flight.slots:
        return False
    return any(row.output.num_generated + num_rounds < row.params.max_tokens for row in flight.rows)


def note_round(row: Row, slot: int, report: RoundReport) -> LastRound:
    """Adds a slot's round to its row's figures."""
    accepted, drafted = int(report.num_accepted_drafts[slot]), int(report.num_drafts[slot])
    row.stats.drafts_per_round.append(drafted)
    row.stats.accepted_drafts_per_round.append(accepted)
    row.stats.acceptance_lengths.append(accepted + 1)
    return LastRound(report.drafts[slot, :drafted].tolist(), accepted, report.chosen[slot].tolist())


def weigh(adaptive: AdaptiveDrafting, flight: Flight, reports: Sequence[RoundReport]) -> None:
    """Tells what the rounds cost and gave, and notes what follows for those to come."""
    ran = [report.num_accepted_drafts[flight.slots].tolist() for report in reports]
    rounds = [[n for n in accepted if n != NOT_RUN] for accepted in ran]
    rounds = [accepted for accepted in rounds if accepted]
    seconds = (time.monotonic() - flight.started) / max(1, len(rounds))
    for accepted in rounds:
        note = adaptive.observe(len(flight.rows), flight.draft_len, seconds, accepted)
        if note is not None:
            for row in flight.rows:
                row.stats.notes.append(note)
