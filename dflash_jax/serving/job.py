"""One request on its way through a `Service`: what its caller holds, and what it hears.

`service.py` makes and moves jobs; the methods that its thread alone may call say so.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

from dflash_jax.serving.output import Piece
from dflash_jax.serving.request import Completion
from dflash_jax.serving.row import Row

Outcome = Literal["done", "cancelled", "timeout", "failed"]


class Update(NamedTuple):
    """What one step made final for one answer of a request.

    Attributes:
        choice: which answer, 0 … n - 1.
        accepted: drafts that the target agreed with, for each round since the last update.
        at: `time.monotonic()` when it was known.
    """

    choice: int
    piece: Piece
    accepted: list[int]
    at: float


Listener = Callable[[Update], None]


class Job:
    """One request on its way; made by `Service.submit`.

    Args:
        cancel: takes it out of the engine.
        deadline: `time.monotonic()` after which it is aborted; None = never.

    Attributes:
        rows: its n answers.
        finished: its `Completion`, for who waits without a thread of his own.
        submitted: `time.monotonic()` when it was asked for.
        outcome, seconds: how it ended, and after what time; None before that.
    """

    def __init__(self, cancel: Callable[["Job"], None], listener: Listener, deadline: float | None):
        self._cancel, self._listener, self._deadline = cancel, listener, deadline
        self._rounds: dict[int, int] = {}
        self.rows: Sequence[Row] = ()
        self.finished: Future[Completion] = Future()
        self.finished.set_running_or_notify_cancel()  # nobody who waits can cancel the future
        self.submitted = time.monotonic()
        self.cancelled = False
        self.outcome: Outcome | None = None
        self.seconds: float | None = None

    def cancel(self) -> None:
        """Ends it at the next step's border; at any moment, as often as you like."""
        self._cancel(self)

    def completion(self, timeout: float | None = None) -> Completion:
        """Its `Completion`, waited for. Raises `TimeoutError` after `timeout` seconds."""
        return self.finished.result(timeout)

    # Called by the service's thread only.

    def hand_on(self, row: Row, piece: Piece) -> None:
        """Tells the listener; the rounds are those since it was told last."""
        seen = self._rounds.get(row.choice, 0)
        accepted = row.stats.accepted_drafts_per_round[seen:]
        self._rounds[row.choice] = seen + len(accepted)
        self._listener(Update(row.choice, piece, accepted, time.monotonic()))

    def end(self, completion: Completion, *, failed: bool) -> None:
        """Notes the outcome, which is "done" only if each answer came to its own end."""
        aborted = any(choice.finish_reason == "abort" for choice in completion.choices)
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if not aborted:
            self.outcome = "done"
        elif failed or not (self.cancelled or late):
            self.outcome = "failed"
        else:
            self.outcome = "cancelled" if self.cancelled else "timeout"
        self.seconds = time.monotonic() - self.submitted
        self.finished.set_result(completion)
