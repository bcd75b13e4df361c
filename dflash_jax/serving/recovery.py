"""After a failed execution: who may have caused it, and how everybody goes on from what they have.

The runtime has donated the arenas to what failed, so they are gone: new ones are allocated, and
whoever was in a slot waits again and prefills its prompt and its answer so far. Who took part is
tried alone, once: what fails then is the request's own fault. `batch.py` catches the failure and
runs what is decided here.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

from dflash_jax.errors import EngineError
from dflash_jax.serving.row import Row
from dflash_jax.serving.scheduler import Chunk, Scheduler

logger = logging.getLogger(__name__)

# Failed steps of several requests, each of which went well alone, before the engine gives up.
MOST_FAILURES = 3


class Suspects:
    """Who is under suspicion; plain host state.

    Attributes:
        involved: rows of the execution that is in work.
        trials: rows to be tried alone, the first one next.
        failures: failed steps since a round of several rows went well.
    """

    def __init__(self) -> None:
        self.involved: list[Row] = []
        self.trials: list[Row] = []
        self.failures = 0

    @property
    def too_many(self) -> bool:
        """Whether so many steps failed that nobody but the engine can be at fault."""
        return self.failures > MOST_FAILURES

    def clear_name(self) -> None:
        """A round went well; one of a suspect alone says nothing of the engine."""
        if not self.trials:
            self.failures = 0

    def blame(self, error: RuntimeError) -> Row | None:
        """Counts a failed step; the offender, if it was a suspect that failed alone too."""
        involved = self._open()
        logger.error("an execution failed with %d requests in it: %s", len(involved), error)
        self.failures += 1
        return self.trials.pop(0) if involved and involved == self.trials[:1] else None

    def accuse(self) -> None:
        """Puts who took part in the failed execution on trial, unless trials go on."""
        if not self.trials:
            self.trials = self._open()

    def _open(self) -> list[Row]:
        return [row for row in self.involved if row.finish_reason is None]


def requeue_running(scheduler: Scheduler[Row]) -> None:
    """Whoever was in a slot waits at the head of the queue, to be prefilled from the start."""
    rows = list(scheduler.running)
    scheduler.requeue(rows)
    for row in rows:
        row.length = len(row.held)
        row.stats.recoveries += 1
    for row in scheduler.waiting:
        # One may have been on its way into a slot.
        row.computed, row.slot = 0, None


def try_alone(
    row: Row,
    scheduler: Scheduler[Row],
    *,
    place: Callable[[Row], bool],
    prefill: Callable[[Chunk[Row]], None],
    decode: Callable[[Row], None],
) -> None:
    """Runs one request through its prompt and one round with nobody beside it.

    Args:
        place: gives it a slot, or says that there is none.
        prefill: computes a chunk, and moves `computed` on.
        decode: runs one round and reads it.
    """
    if row.finish_reason is None and row.slot is None:
        scheduler.admit_first(row, place)
        if row.slot is None:
            # No pages beside those who were tried before it: it waits as others do.
            return
    while row.finish_reason is None and not row.decodes:
        prefill(scheduler.rest(row))
    if row.finish_reason is None:
        decode(row)


def give_up(
    error: Exception,
    failures: int,
    scheduler: Scheduler[Row],
    cancel: Callable[[Row, str], None],
) -> NoReturn:
    """Aborts every open request: the engine is beyond repair.

    Raises:
        EngineError: always.
    """
    everybody = [*scheduler.waiting, *scheduler.running]
    for row in everybody:
        cancel(row, f"the engine failed: {error}")
    raise EngineError(
        f"the engine failed {failures} times in a row and aborted {len(everybody)} "
        f"requests: {error}; start it again"
    ) from error
