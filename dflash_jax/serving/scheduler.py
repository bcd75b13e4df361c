"""Who computes what in the next step: one token budget for prompts and for decoding rows.

Plain Python about counts of tokens, nothing of slots' contents, devices or text. Requests come
first, are served first; decoding rows take turns where the budget holds fewer than there are; and
neither side starves the other:

- a decoding row runs at least once in `longest_gap` steps, however many prompts arrive;
- a prompt at the head gets tokens at least once in PATIENCE + 1 steps, however many rows decode;
- while rows decode, one step computes one chunk at most.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

# Prompts that find the budget full are let in by leaving rows out of one step: with 4, decoding
# loses a fifth of its rounds at the most.
PATIENCE = 4


@dataclasses.dataclass(eq=False)
class Entry:
    """One request as the scheduler sees it.

    Attributes:
        length: tokens that must be computed before it decodes.
        computed: how many of them are, those taken over included.
        slot: where it is; None while it waits and after the end.
        last_step: the step of its last round, or of its admission: turns go by it.
    """

    length: int
    computed: int = 0
    slot: int | None = None
    last_step: int = 0

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done."""
        return self.slot is not None and self.computed >= self.length


E = TypeVar("E", bound=Entry)


@dataclasses.dataclass(frozen=True)
class Chunk(Generic[E]):
    """The next tokens of a prompt: `count` from `start` on."""

    entry: E
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.entry.length


@dataclasses.dataclass(frozen=True)
class Step(Generic[E]):
    """What one step computes: chunks first, then one round of the rows."""

    chunks: list[Chunk[E]]
    rows: list[E]


class Scheduler(Generic[E]):
    """The queue and the requests in slots; `E` is what the caller makes of an entry.

    Args:
        num_tokens: budget of a step, `max_num_tokens`.
        row_tokens: what a decoding row takes of it, 1 + K.
        chunk_tokens: longest chunk that is compiled.
    """

    def __init__(self, *, num_tokens: int, row_tokens: int, chunk_tokens: int):
        if row_tokens > num_tokens:
            raise ValueError(f"a row of {row_tokens} tokens is beyond a step of {num_tokens}")
        self.num_tokens, self.row_tokens = num_tokens, row_tokens
        self.chunk_tokens = min(chunk_tokens, num_tokens)
        self.waiting: collections.deque[E] = collections.deque()
        self.running: list[E] = []
        self._steps = 0
        self._starved = 0

    def submit(self, entry: E) -> None:
        """Queues a request."""
        self.waiting.append(entry)

    def requeue(self, entries: Iterable[E]) -> None:
        """Puts requests that were running back before all others, in their order."""
        again = list(entries)
        for entry in again:
            self.remove(entry)
            entry.computed, entry.slot = 0, None
        self.waiting.extendleft(reversed(again))

    def remove(self, entry: E) -> None:
        """Takes a request out, wherever it is; nothing happens if it is not here."""
        if entry in self.waiting:
            self.waiting.remove(entry)
        if entry in self.running:
            self.running.remove(entry)
        entry.slot = None

    def admit(self, place: Callable[[E], bool]) -> None:
        """Admits from the head of the queue while `place` finds room and sets the slot."""
        while self.waiting and place(self.waiting[0]):
            self._start(self.waiting.popleft())

    def admit_first(self, entry: E, place: Callable[[E], bool]) -> None:
        """Admits one that waits before all others."""
        if place(entry):
            self.waiting.remove(entry)
            self._start(entry)

    def next_step(self) -> Step[E]:
        """What to compute now; the caller does it and moves `computed` on."""
        self._steps += 1
        prompts = [entry for entry in self.running if not entry.decodes]
        decoding = sorted(
            (entry for entry in self.running if entry.decodes), key=lambda entry: entry.last_step
        )
        most = self.num_tokens
        if prompts and self._starved >= PATIENCE:
            most -= self._next_chunk(prompts[0], self.num_tokens)
        rows = decoding[: most // self.row_tokens]
        for entry in rows:
            entry.last_step = self._steps
        chunks = self._chunks(prompts, self.num_tokens - len(rows) * self.row_tokens)
        chunks = chunks[:1] if rows else chunks
        self._starved = 0 if chunks or not prompts else self._starved + 1
        return Step(chunks, rows)

    def rest(self, entry: E) -> Chunk[E]:
        """As much of one prompt as a chunk holds, whoever else is there."""
        return Chunk(entry, entry.computed, self._next_chunk(entry, self.chunk_tokens))

    def longest_gap(self, num_decoding: int) -> int:
        """Most steps from one round of a row to its next while `num_decoding` rows decode.

        A turn of all rows takes ceil(rows / rows a step) steps, and one step in PATIENCE + 1 may
        belong to a prompt alone.
        """
        turn = -(-num_decoding // (self.num_tokens // self.row_tokens))
        return turn + -(-turn // PATIENCE)

    def _start(self, entry: E) -> None:
        # Behind those who run already: many short answers do not push a long one aside.
        entry.last_step = self._steps
        self.running.append(entry)

    def _chunks(self, prompts: list[E], budget: int) -> list[Chunk[E]]:
        chunks = []
        for entry in prompts:
            count = self._next_chunk(entry, budget)
            if count == 0:
                break
            chunks.append(Chunk(entry, entry.computed, count))
            budget -= count
            if count < entry.length - entry.computed:
                break
        return chunks

    def _next_chunk(self, entry: E, budget: int) -> int:
        return min(entry.length - entry.computed, budget, self.chunk_tokens)
