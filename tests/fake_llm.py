"""An `LLM` without a model for tests of what stands around one: scripted tokens, real rows.

It keeps the contract of `submit`, `step`, `busy`, `cancel`, `completion` and `load`, and notes who
calls: two threads in it, one after the other even, are a failure. The text of an answer is letters
that depend on the prompt alone; round i accepts i % (K + 1) drafts.
"""

import dataclasses
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.serving.counters import Counters, Load
from dflash_jax.serving.output import Output, Piece
from dflash_jax.serving.request import Completion, SamplingParams, TokenLogprob, sample_seed
from dflash_jax.serving.row import Row
from dflash_jax.serving.text import Tokenizer

WIDTH = 3
LETTERS = range(ord("a"), ord("z") + 1)


def answer_ids(prompt: Sequence[int], count: int) -> list[int]:
    """The first ids of what a prompt is answered with: bytes of lower-case letters."""
    return [LETTERS[(sum(prompt) + place) % len(LETTERS)] for place in range(count)]


class FakeLLM:
    """Attributes that tests set: `paused` (steps do nothing), `pace` (seconds of a step), `failure`
    (raised by the next step), `row_errors` (prompt -> error of a row that is aborted)."""

    def __init__(self, *, slots: int = 2, served: int = 64, tokenizer: Tokenizer | None = None):
        self.tokenizer, self.slots, self.compiles_in_service = tokenizer, slots, 0
        self.config = SimpleNamespace(
            max_seq_len=served,
            max_batch_size=slots,
            max_draft_len=WIDTH,
            speculation="dflash",
            unqualified=None,
        )
        self.paused, self.pace = False, 0.0
        self.failure: Exception | None = None
        self.row_errors: dict[tuple[int, ...], str] = {}
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.submitted: list[SamplingParams] = []
        self.counters = Counters(accepted_at=[0] * WIDTH)
        self._updates: list[tuple[Row, Piece]] = []
        self._user: int | None = None

    def chat_ids(self, messages: Sequence[Any]) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this target's folder has no tokenizer.json: give token ids")
        return self.tokenizer.chat_ids(messages)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout: float | None = None
    ) -> list[Row]:
        self._note_thread()
        params.check()
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed")
        if len(prompt) + params.max_tokens > self.config.max_seq_len:
            raise RequestError(f"beyond the served length of {self.config.max_seq_len}")
        self.submitted.append(params)
        deadline = None if timeout is None else time.monotonic() + timeout
        seed = 7 if params.seed is None else params.seed
        rows = [
            Row(
                len(prompt),
                prompt=list(prompt),
                params=params,
                seed=sample_seed(seed, choice),
                ends=frozenset(),
                output=Output(self.tokenizer, params, frozenset()),
                choice=choice,
                deadline=deadline,
            )
            for choice in range(params.n)
        ]
        for row in rows:
            row.stats.speculation = "dflash" if params.speculate else "none"
        self.waiting += rows
        return rows

    @property
    def busy(self) -> bool:
        self._note_thread()
        return bool(self.waiting or self.running or self._updates)

    def step(self) -> list[tuple[Row, Piece]]:
        self._note_thread()
        if self.failure is not None:
            raise self.failure
        for row in [*self.waiting, *self.running]:
            if row.deadline is not None and row.deadline < time.monotonic():
                self._abort(row, "its deadline has passed")
        time.sleep(max(self.pace, 0.001 if self.paused else 0.0))
        if not self.paused:
            self._decode()
        updates, self._updates = self._updates, []
        return updates

    def cancel(self, row: Row) -> None:
        self._note_thread()
        self._abort(row, "it was cancelled before its end")

    def completion(self, rows: Sequence[Row]) -> Completion:
        choices = [self._done(row) for row in rows]
        choices[0].choices = choices
        return choices[0]

    def load(self) -> Load:
        return Load(
            **dataclasses.asdict(self.counters),
            waiting=len(self.waiting),
            prefilling=0,
            decoding=len(self.running),
            slots=self.slots,
            free_slots=self.slots - len(self.running),
            prefix_hits=0,
            prefix_tokens=0,
        )

    def _decode(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        for row in list(self.running):
            if error := self.row_errors.get(tuple(row.prompt)):
                self._abort(row, error)
                continue
            accepted = row.stats.num_rounds % (WIDTH + 1) if row.params.speculate else 0
            first = not row.generated
            count = 1 if first else accepted + 1
            new = answer_ids(row.prompt, len(row.generated) + count)[len(row.generated) :]
            if not first:
                self.counters.round(WIDTH, accepted)
                row.stats.drafts_per_round.append(WIDTH)
                row.stats.accepted_drafts_per_round.append(accepted)
                row.stats.acceptance_lengths.append(count)
            row.generated += new
            self._push(row, new)

    def _push(self, row: Row, new: list[int]) -> None:
        wanted = row.params.logprobs
        scores = None
        if wanted is not None:
            scores = [
                TokenLogprob(i, -0.5, ((i, -0.5), (i + 1, -1.5), (-1, float("-inf")))[:wanted])
                for i in new
            ]
        piece = row.output.push(new, scores)
        if any((piece.text, piece.token_ids, piece.finish_reason)):
            self._updates.append((row, piece))
        if piece.finish_reason is not None:
            self.running.remove(row)

    def _abort(self, row: Row, error: str) -> None:
        if row.finish_reason is not None:
            return
        row.error = error
        self._updates.append((row, row.output.abort()))
        for rows in (self.waiting, self.running):
            if row in rows:
                rows.remove(row)

    def _done(self, row: Row) -> Completion:
        output = row.output
        answer = Completion(
            text=output.text,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason or "abort",
            prompt_token_ids=row.prompt,
            logprobs=output.logprobs,
            stats=row.stats,
            error=row.error,
        )
        answer.choices.append(answer)
        return answer

    def _note_thread(self) -> None:
        caller = threading.get_ident()
        self._user = self._user or caller
        assert caller == self._user, "an engine is for one thread"
