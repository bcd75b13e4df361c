"""`Service`: one thread that drives an `LLM` for callers in any other thread.

Only that thread touches the engine: what callers ask travels to it as commands, which it carries
out between two steps. Nothing here knows HTTP (`server.py`) or what a request looked like there
(`openai_api.py`).
"""

import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from dflash_jax.errors import DFlashError, EngineError, RequestError
from dflash_jax.serving.counters import Load
from dflash_jax.serving.job import Job, Listener
from dflash_jax.serving.output import Piece
from dflash_jax.serving.request import SamplingParams
from dflash_jax.serving.row import Row

logger = logging.getLogger(__name__)

_ABORTED = Piece("", [], None, "abort")
_LONGEST_RETRY = 60
_RECENT = 1 / 8  # weight of the newest request in the mean time that a request takes


class QueueFull(DFlashError, RuntimeError):
    """As many answers wait as may; `retry_after` seconds from now there should be room."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class ServiceStopped(DFlashError, RuntimeError):
    """No new request is taken: it drains, has been shut down, or its engine failed."""


class Service:
    """Serves requests from any thread with one engine.

    Args:
        llm: an `LLM`; nobody else may use it until `shutdown`.
        max_queue: answers that may wait for a slot; a request with n answers counts n times.
        default_timeout: seconds that a request may take when it does not say; None = any time.

    Its thread ends with `shutdown` (or the `with` block), or when the engine has failed.
    """

    def __init__(self, llm: Any, *, max_queue: int = 256, default_timeout: float | None = None):
        self.llm = llm
        self.max_queue, self.default_timeout = max_queue, default_timeout
        self.load: Load = llm.load()
        """As it was after the latest step."""
        self.error: BaseException | None = None
        """Why the engine failed; None while it has not."""
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._jobs: dict[Row, Job] = {}
        self._open = 0  # requests that were asked for and have not ended
        self._refuses: str | None = None
        self._ending = False
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="dflash-jax-service", daemon=False)
        self._thread.start()

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.alive and self._refuses is None

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        listener: Listener,
        *,
        timeout: float | None = None,
    ) -> Job:
        """Queues a request; returns when the engine has taken it, one step later at most.

        Args:
            listener: called in the service's thread with each `Update`; must not block.
            timeout: seconds after which it is aborted; None = `default_timeout`.

        Raises:
            RequestError: it cannot be served.
            QueueFull: `max_queue` answers wait already.
            ServiceStopped: no new requests are taken.
        """
        return self.ask(prompt, params, listener, timeout=timeout).result()

    def ask(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        listener: Listener,
        *,
        timeout: float | None = None,
    ) -> "Future[Job]":
        """`submit` without waiting: the future has its result or what it raises."""
        seconds = self.default_timeout if timeout is None else timeout
        job = Job(self.cancel, listener, None if seconds is None else time.monotonic() + seconds)
        taken: Future[Job] = Future()
        taken.set_running_or_notify_cancel()
        with self._changed:
            if self._refuses is not None:
                taken.set_exception(ServiceStopped(self._refuses))
                return taken
            self._open += 1
            self._commands.append(lambda: self._answer(taken, job, prompt, params, seconds))
            self._changed.notify_all()
        return taken

    def cancel(self, job: Job) -> None:
        """As `Job.cancel`."""
        with self._changed:
            self._commands.append(lambda: self._cancel(job))
            self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no new requests and waits for the open ones.

        Returns:
            Whether all have ended; False after `timeout` seconds.
        """
        with self._changed:
            self._refuses = self._refuses or "the server is shutting down: ask another one"
            return self._changed.wait_for(lambda: self._open == 0, timeout)

    def shutdown(self) -> None:
        """Cancels what is open and ends the thread. Every listener hears of the end."""
        with self._changed:
            self._refuses = self._refuses or "the server has been shut down: ask another one"
            self._ending = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the service's thread from here on.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._carry_out()
                if self.llm.busy and not self._ending:
                    self._step()
        except Exception as error:
            logger.exception("the engine failed: every open request ends with an error")
            self.error = error
        finally:
            self._end_all()

    def _carry_out(self) -> None:
        """Waits for something to do, then does what was asked."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._ending or self.llm.busy)
            commands, self._commands = self._commands, collections.deque()
        for command in commands:
            command()

    def _step(self) -> None:
        for row, piece in self.llm.step():
            if row in self._jobs:
                self._hand_on(row, piece)
        self.load = self.llm.load()

    def _answer(self, taken: "Future[Job]", job: Job, *request: Any) -> None:
        try:
            self._take(job, *request)
        except Exception as error:
            self._close()
            taken.set_exception(error)
        else:
            taken.set_result(job)

    def _take(
        self, job: Job, prompt: str | Sequence[int], params: SamplingParams, seconds: float | None
    ) -> None:
        if self._ending:
            raise ServiceStopped(self._refuses)
        params.check()  # before n is counted with
        self._refuse_overflow(params.n)
        job.rows = self.llm.submit(prompt, params, timeout=seconds)
        self._jobs |= dict.fromkeys(job.rows, job)
        self.load = self.llm.load()

    def _refuse_overflow(self, answers: int) -> None:
        load = self.llm.load()
        if answers > self.max_queue + load.slots:
            raise RequestError(
                f"n={answers}: {load.slots} answers decode at a time and {self.max_queue} may "
                "wait; ask for fewer, or start with a larger max_queue"
            )
        if load.waiting + answers > self.max_queue + load.free_slots:
            ahead = (load.waiting + load.slots) / load.slots
            seconds = min(max(math.ceil(ahead * self._mean_seconds), 1), _LONGEST_RETRY)
            raise QueueFull(
                f"{load.waiting} answers wait, of {self.max_queue} that may, and this request "
                f"would add {answers}: try again in {seconds} s",
                seconds,
            )

    def _cancel(self, job: Job) -> None:
        """Only what has not ended: afterwards it is too late, and nothing happens."""
        rows = [row for row in job.rows if row in self._jobs]
        job.cancelled = job.cancelled or bool(rows)
        for row in rows if self.error is None else ():
            self.llm.cancel(row)

    def _hand_on(self, row: Row, piece: Piece, *, failed: bool = False) -> None:
        job = self._jobs[row]
        try:
            job.hand_on(row, piece)
        except Exception:  # of the listener: nobody else's business
            logger.exception("a request's listener raised: the request is cancelled")
            self.cancel(job)
        if piece.finish_reason is None:
            return
        del self._jobs[row]
        if not any(other in self._jobs for other in job.rows):
            self._end(job, failed=failed)

    def _end(self, job: Job, *, failed: bool) -> None:
        job.end(self.llm.completion(job.rows), failed=failed)
        self._mean_seconds += _RECENT * ((job.seconds or 0.0) - self._mean_seconds)
        self._close()

    def _close(self) -> None:
        """One request less, for who drains."""
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _end_all(self) -> None:
        """Nobody waits for ever: what is open is aborted, what was asked is refused."""
        failed = self.error is not None
        with self._changed:
            self._ending = True
            if failed:
                self._refuses = "the engine has failed: the server must be started again"
            commands, self._commands = self._commands, collections.deque()
        for command in commands:
            command()
        if not failed:
            self._cancel_all()
        for row in list(self._jobs):
            self._hand_on(row, _ABORTED, failed=failed)

    def _cancel_all(self) -> None:
        for job in set(self._jobs.values()):
            self._cancel(job)
        try:
            while self.llm.busy:
                self._step()
        except EngineError as error:
            logger.error("the engine failed while it was shut down: %s", error)
