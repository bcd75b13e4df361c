"""Requests through one engine, step by step: admit, prefill, decode, deliver, and start again.

Binds the plain-Python deciders (`scheduler.py`: who computes what; `places.py`: where) to the
device's programs (`engine.py`; `rounds.py` for those that decode). A row's answer depends on
nothing but its own prompt, parameters and seed: not on who is beside it, when it came, or whether
it had to start again.
"""

import logging
import time
from typing import NoReturn

from dflash_jax.decoding.report import RoundReport
from dflash_jax.serving.admission import enter, make_slots, shares_a_prompt_in_work
from dflash_jax.serving.counters import Counters, Load
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.flight import Flight
from dflash_jax.serving.logprobs import token_logprobs
from dflash_jax.serving.output import Piece
from dflash_jax.serving.recovery import Suspects, give_up, requeue_running, try_alone
from dflash_jax.serving.rounds import Rounds
from dflash_jax.serving.row import Row
from dflash_jax.serving.scheduler import Chunk, Scheduler

logger = logging.getLogger(__name__)

Update = tuple[Row, Piece]


class Batch:
    """Slots of one engine and the queue before them; first come, first served.

    Args:
        reuse: whether prompts take over prefixes that slots hold; None: as configured.
    """

    def __init__(self, engine: Engine, *, reuse: bool | None = None):
        config = engine.config
        self.engine = engine
        self.scheduler: Scheduler[Row] = Scheduler(
            num_tokens=config.max_num_tokens,
            row_tokens=config.verify_width,
            chunk_tokens=engine.chunk_sizes[-1],
        )
        self._reuse = config.prefix_reuse if reuse is None else reuse
        self._slots = make_slots(self.engine, reuse=self._reuse)
        self._suspects = Suspects()
        self._timed: list[Row] = []
        self._updates: list[Update] = []
        self.counters = Counters(accepted_at=[0] * config.max_draft_len)
        self._rounds = Rounds(engine, self.counters)
        self.last_rounds = self._rounds.last

    @property
    def slots(self) -> list[Row | None]:
        """The row of each slot."""
        table: list[Row | None] = [None] * self.engine.config.max_batch_size
        for row in self.scheduler.running:
            if row.slot is not None:
                table[row.slot] = row
        return table

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._updates)

    def submit(self, row: Row) -> None:
        """Queues a checked request."""
        row.length = len(row.held)
        self.scheduler.submit(row)
        if row.deadline is not None:
            self._timed.append(row)

    def cancel(self, row: Row, error: str | None = None, *, spoilt: bool = False) -> None:
        """Takes a request out, wherever it is; its slot is free at once.

        Args:
            spoilt: what its slot holds is wrong, see `_leave`.
        """
        if row.finish_reason is not None:
            return
        row.error = error
        self._updates.append((row, row.output.abort()))
        self._leave(row, spoilt=spoilt)

    def load(self) -> Load:
        """Who waits and runs now, and what was done so far."""
        slots = self.engine.config.max_batch_size
        return Load.now(self.counters, self.scheduler, self._slots, slots)

    def step(self) -> list[Update]:
        """Admits what fits, runs the step's chunks and one dispatch of rounds.

        Returns:
            What became final, and for whom.

        Raises:
            EngineError: the engine itself is beyond repair; every open request has been aborted.
        """
        self._expire()
        try:
            if not self._fly_on():
                self._land()
                self._compute()
        except RuntimeError as error:
            # What the runtime raises when an execution fails.
            self._recover(error)
        except BaseException:
            # Interrupted, or a fault here: the arenas may have moved on without their report.
            self._start_again()
            raise
        updates, self._updates = self._updates, []
        return updates

    def _compute(self) -> None:
        """One step of everybody, or of a suspect alone."""
        if self._suspects.trials:
            self._try_alone(self._suspects.trials[0])
            return
        self.scheduler.admit(self._place)
        self._close_hole()
        step = self.scheduler.next_step()
        for chunk in step.chunks:
            self._prefill(chunk)
        rows = [row for row in step.rows if row.finish_reason is None]
        if rows:
            self._dispatch(rows)
            if not self._may_fly():
                self._land()

    # Admission

    def _place(self, row: Row) -> bool:
        """Finds room for a request and puts it there; False: it waits."""
        shares = self._reuse and not self._suspects.trials
        if shares and shares_a_prompt_in_work(row, self.scheduler.running):
            return False
        # A round that starts at the last token may commit all that it verifies.
        verified = self.engine.config.verify_width
        most = len(row.prompt) + row.params.max_tokens + verified
        place = self._slots.take(row.held, most)
        if place is None:
            return False
        self._suspects.involved = [row]
        self.last_rounds.pop(place.slot, None)
        enter(row, place, self.engine)
        return True

    def _close_hole(self) -> None:
        """Moves the last row to the front where a smaller bucket of rows will do then."""
        while (hole := self._slots.hole()) is not None:
            source, target = hole
            row = next(row for row in self.scheduler.running if row.slot == source)
            self._suspects.involved = [row]
            self.engine.move(source, target)
            self._slots.move(source, target)
            row.slot = target
            self._rounds.moved(source, target)

    # Passes

    def _prefill(self, chunk: Chunk[Row]) -> None:
        row = chunk.entry
        assert row.slot is not None
        ids = row.held[chunk.start : chunk.start + chunk.count]
        self._suspects.involved = [row]
        packed = self.engine.prefill(row.slot, ids, last=chunk.is_last, anchor=row.anchor)
        row.computed += chunk.count
        self.counters.prefill_tokens += chunk.count
        if not chunk.is_last:
            return
        report = self.engine.read_prefill(packed)
        self._slots.hold(row.slot, row.held)
        if row.anchor is None:
            self._deliver(row, report, 0)

    def _dispatch(self, rows: list[Row]) -> None:
        self._suspects.involved = rows
        self._rounds.dispatch(rows)

    def _may_fly(self) -> bool:
        """Whether the next round can be dispatched before this one's tokens are known."""
        if self._suspects.trials or self.scheduler.waiting:
            return False
        return self._rounds.may_follow(self.scheduler.running)

    def _fly_on(self) -> bool:
        """Dispatches the next round of the same rows, then reads the one before."""
        if not self._may_fly():
            return False
        before = self._rounds.flight
        assert before is not None
        self._dispatch(before.rows)
        self._read(before)
        return True

    def _land(self) -> None:
        """Reads the dispatched round, if there is one."""
        flight, self._rounds.flight = self._rounds.flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: Flight) -> None:
        self._suspects.involved = flight.rows
        reports = self._rounds.wait(flight)
        self._suspects.clear_name()
        for row, report, slot in self._rounds.results(flight, reports):
            self._deliver(row, report, slot)

    # Delivery

    def _deliver(self, row: Row, report: RoundReport, index: int) -> None:
        """Hands on what a pass committed."""
        accepted = int(report.num_accepted_drafts[index])
        new = report.chosen[index, : accepted + 1].tolist()
        if min(new) < 0:
            logger.error("the logits of a request became NaN: it is aborted and its slot zeroed")
            error = "the model's logits became NaN in this request: nothing follows them"
            self.cancel(row, error, spoilt=True)
            return
        row.generated += new
        if row.suffixes is not None:
            for token in new:
                row.suffixes.extend(token)
        piece = row.output.push(new, token_logprobs(report, index, len(new), row.params.logprobs))
        if piece.token_ids or piece.text or piece.finish_reason:
            self._updates.append((row, piece))
        if piece.finish_reason is not None:
            self.counters.finished += 1
            self._leave(row)

    def _leave(self, row: Row, *, spoilt: bool = False) -> None:
        """Frees the slot; it still holds what is committed, for others to take over.

        Args:
            spoilt: what it holds is wrong: the slot is zeroed, since masking lets NaN through.
        """
        # What lies behind the end was committed and not delivered.
        row.stats.trim(len(row.generated) - len(row.token_ids))
        if row.slot is not None and spoilt:
            self.engine.clean(row.slot, self._slots.discard(row.slot))
        elif row.slot is not None:
            self._slots.hold(row.slot, row.held if row.decodes else row.held[: row.computed])
            self._slots.release(row.slot)
        self.scheduler.remove(row)
        row.suffixes = None

    def _expire(self) -> None:
        now = time.monotonic()
        for row in self._timed:
            if row.deadline is not None and row.deadline < now:
                self.cancel(row, "its deadline has passed: allow more time or ask for fewer tokens")
        self._timed = [row for row in self._timed if row.finish_reason is None]

    # Failures

    def _recover(self, error: RuntimeError) -> None:
        """New arenas, and all requests start again from what they had committed."""
        offender = self._suspects.blame(error)
        if offender is not None:
            self.cancel(offender, f"the execution failed, alone too: {error}")
        self._start_again()
        if self._suspects.too_many:
            self._give_up(error)
        self._suspects.accuse()

    def _start_again(self) -> None:
        """Empty arenas; whoever was in a slot waits at the head of the queue."""
        self._rounds.flight = None
        self.last_rounds.clear()
        requeue_running(self.scheduler)
        self.counters.recoveries += 1
        try:
            self.engine.reset()
        except Exception as error:
            self._give_up(error)
        hits, tokens = self._slots.hits, self._slots.hit_tokens
        self._slots = make_slots(self.engine, reuse=self._reuse)
        self._slots.hits, self._slots.hit_tokens = hits, tokens

    def _give_up(self, error: Exception) -> NoReturn:
        self._suspects.trials.clear()
        give_up(error, self._suspects.failures, self.scheduler, self.cancel)

    def _try_alone(self, row: Row) -> None:
        try_alone(
            row,
            self.scheduler,
            place=self._place,
            prefill=self._prefill,
            decode=self._decode_alone,
        )
        self._suspects.trials.remove(row)

    def _decode_alone(self, row: Row) -> None:
        self._dispatch([row])
        self._land()
