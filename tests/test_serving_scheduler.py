"""The scheduler alone: budgets, turns, and that nobody waits for ever; it is plain Python."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_jax.serving.scheduler import PATIENCE, Entry, Scheduler


@dataclasses.dataclass(eq=False)
class Request(Entry):
    """An entry that knows what it wants, and what it got."""

    rounds: int = 0
    wanted: int = 1


class Served:
    """A scheduler with `slots` slots whose work is only counted."""

    def __init__(self, slots: int, num_tokens: int, row_tokens: int, chunk_tokens: int):
        self.scheduler: Scheduler[Request] = Scheduler(
            num_tokens=num_tokens, row_tokens=row_tokens, chunk_tokens=chunk_tokens
        )
        self.free = set(range(slots))
        self.slots = slots
        self.steps = 0

    def place(self, entry: Request) -> bool:
        if not self.free:
            return False
        entry.slot = min(self.free)
        self.free.remove(entry.slot)
        return True

    def leave(self, entry: Request) -> None:
        if entry.slot is not None:
            self.free.add(entry.slot)
        self.scheduler.remove(entry)

    def step(self):
        """Runs one step and checks its budget; returns what it was."""
        self.steps += 1
        self.scheduler.admit(self.place)
        step = self.scheduler.next_step()
        spent = sum(chunk.count for chunk in step.chunks)
        spent += len(step.rows) * self.scheduler.row_tokens
        assert spent <= self.scheduler.num_tokens
        for chunk in step.chunks:
            assert chunk.start == chunk.entry.computed
            assert 1 <= chunk.count <= self.scheduler.chunk_tokens
            chunk.entry.computed += chunk.count
            assert chunk.entry.computed <= chunk.entry.length
            assert chunk.is_last == chunk.entry.decodes
        assert len({id(row) for row in step.rows}) == len(step.rows)
        for row in step.rows:
            assert row.slot is not None
            row.rounds += 1
            if row.rounds == row.wanted:
                self.leave(row)
        return step


class Traffic(RuleBasedStateMachine):
    """Arrivals, cancels, long prompts and token limits in any order."""

    @initialize(
        slots=st.integers(1, 5),
        row_tokens=st.integers(1, 8),
        rows=st.integers(1, 4),
        extra=st.integers(0, 20),
        chunk=st.integers(1, 16),
    )
    def start(self, slots, row_tokens, rows, extra, chunk):
        self.served = Served(slots, row_tokens * rows + extra, row_tokens, chunk)
        self.open: list[Request] = []
        self.waits: dict[int, int] = {}

    @rule(length=st.integers(1, 60), wanted=st.integers(1, 6))
    def arrive(self, length, wanted):
        request = Request(length, wanted=wanted)
        self.open.append(request)
        self.served.scheduler.submit(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.open))
        self.open.remove(request)
        self.served.leave(request)
        self.served.scheduler.remove(request)  # twice: nothing happens

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def start_again(self, data):
        """What a lost arena does: everybody in a slot waits again, in the same order."""
        running = list(self.served.scheduler.running)
        before = list(self.served.scheduler.waiting)
        self.served.free.update(entry.slot for entry in running if entry.slot is not None)
        self.served.scheduler.requeue(running)
        assert list(self.served.scheduler.waiting) == running + before
        assert all(entry.computed == 0 and entry.slot is None for entry in running)

    @rule()
    def step(self):
        scheduler = self.served.scheduler
        scheduler.admit(self.served.place)
        decoding = [entry for entry in scheduler.running if entry.decodes]
        step = self.served.step()
        ran = {id(row) for row in step.rows}
        waits = {
            id(entry): 0 if id(entry) in ran else self.waits.get(id(entry), 0) + 1
            for entry in decoding
        }
        self.waits = waits
        assert all(wait < scheduler.longest_gap(self.served.slots) for wait in waits.values())
        self.open = [request for request in self.open if request.rounds < request.wanted]

    @invariant()
    def no_slot_is_lost_or_given_twice(self):
        if not hasattr(self, "served"):
            return
        taken = [entry.slot for entry in self.served.scheduler.running]
        assert len(set(taken)) == len(taken)
        assert not set(taken) & self.served.free
        assert len(taken) + len(self.served.free) == self.served.slots

    def teardown(self):
        """Every request that is left finishes, within a bounded number of steps."""
        if not hasattr(self, "served"):
            return
        tokens = sum(request.length for request in self.open)
        rounds = sum(request.wanted for request in self.open)
        bound = (PATIENCE + 1) * (tokens + rounds + 1)
        while self.open:
            assert self.served.steps < 10_000 and bound > 0
            bound -= 1
            self.served.step()
            self.open = [request for request in self.open if request.rounds < request.wanted]
        assert not self.served.scheduler.waiting and not self.served.scheduler.running
        assert len(self.served.free) == self.served.slots


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


def test_a_running_stream_is_not_starved_by_fifty_long_prompts():
    """Fault 63: one request decoding, 50 prompts of 8 chunks queued; a round in every step."""
    served = Served(slots=8, num_tokens=64, row_tokens=8, chunk_tokens=32)
    stream = Request(1, wanted=10**6)
    served.scheduler.submit(stream)
    served.step()
    for _ in range(50):
        served.scheduler.submit(Request(8 * 32, wanted=2))
    for _ in range(200):
        step = served.step()
        assert stream in step.rows
        assert len(step.chunks) <= 1


def test_a_prompt_is_not_starved_by_rows_that_fill_the_budget():
    """The other side of fault 63: eight rows take the whole budget, a prompt arrives."""
    served = Served(slots=9, num_tokens=64, row_tokens=8, chunk_tokens=32)
    rows = [Request(1, wanted=10**6) for _ in range(8)]
    for row in rows:
        served.scheduler.submit(row)
    served.step()
    prompt = Request(96, wanted=1)
    served.scheduler.submit(prompt)
    steps = 0
    while not prompt.decodes:
        served.step()
        steps += 1
    # Three chunks of 32, each after PATIENCE steps of others at the most.
    assert steps <= 3 * (PATIENCE + 1)
    assert min(row.rounds for row in rows) >= steps - 3 - 1


def test_a_long_prompt_among_many_short_ones_is_admitted_in_its_turn():
    served = Served(slots=2, num_tokens=16, row_tokens=4, chunk_tokens=16)
    before = [Request(3) for _ in range(5)]
    long = Request(100)
    after = [Request(3) for _ in range(20)]
    for request in [*before, long, *after]:
        served.scheduler.submit(request)
    while long.slot is None:
        served.step()
    assert all(request.rounds == 0 and request.slot is None for request in after[1:])


def test_rows_take_turns_where_the_budget_holds_fewer():
    served = Served(slots=6, num_tokens=8, row_tokens=4, chunk_tokens=8)
    rows = [Request(1, wanted=10**6) for _ in range(6)]
    for row in rows:
        served.scheduler.submit(row)
    while not all(row.decodes for row in rows):
        served.step()
    start = [row.rounds for row in rows]
    for _ in range(30):
        assert len(served.step().rows) == 2
    assert [row.rounds - first for row, first in zip(rows, start, strict=True)] == [10] * 6


def test_a_paused_row_keeps_its_slot():
    served = Served(slots=3, num_tokens=4, row_tokens=4, chunk_tokens=4)
    rows = [Request(1, wanted=10**6) for _ in range(3)]
    for row in rows:
        served.scheduler.submit(row)
    while not all(row.decodes for row in rows):
        served.step()
    places = [row.slot for row in rows]
    for _ in range(9):
        served.step()
        assert [row.slot for row in rows] == places


def test_chunks_fill_the_budget_when_nobody_decodes():
    served = Served(slots=4, num_tokens=100, row_tokens=8, chunk_tokens=64)
    requests = [Request(length) for length in (30, 64, 90)]
    for request in requests:
        served.scheduler.submit(request)
    step = served.step()
    assert [(chunk.entry, chunk.count) for chunk in step.chunks] == [
        (requests[0], 30),
        (requests[1], 64),
        (requests[2], 6),
    ]


def test_a_row_beyond_the_budget_is_no_scheduler():
    with pytest.raises(ValueError, match="a row of 9 tokens is beyond a step of 8"):
        Scheduler(num_tokens=8, row_tokens=9, chunk_tokens=8)
