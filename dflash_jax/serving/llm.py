"""`LLM`: a target, a drafter and their engine behind `generate`, `stream` and `chat`.

Orders the start, and three gates before it costs anything: files and options, before JAX starts a
backend; the device's memory; the memory of the programs, compiled from shapes. Then weights load
and arenas are allocated. `intake.py` checks requests, one by one, before they queue; what happens
to them then is `batch.py`'s business. `submit`, `step` and `cancel` are for who runs the loop
himself: `service.py` does.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax.config import ResolvedConfig
from dflash_jax.errors import RequestError
from dflash_jax.planning.budget import skips_estimation
from dflash_jax.planning.measured import measure
from dflash_jax.planning.options import serve_config
from dflash_jax.planning.plan import MemoryPlan, refuse_unfit
from dflash_jax.planning.resolve import on_platform
from dflash_jax.progress import Progress
from dflash_jax.serving.allocation import announce, explained
from dflash_jax.serving.batch import Batch, Update
from dflash_jax.serving.counters import Load
from dflash_jax.serving.engine import Arenas, Engine
from dflash_jax.serving.flight import LastRound
from dflash_jax.serving.intake import Intake, Prompt, listed, refused
from dflash_jax.serving.loading import (
    check_tokenizers,
    check_weights,
    compile_pair,
    load_pair,
    read_tokenizer,
)
from dflash_jax.serving.planner import (
    engine_plan,
    memory_now,
    read_pair,
    resolve_pair,
    used_devices,
)
from dflash_jax.serving.request import Completion, SamplingParams
from dflash_jax.serving.row import Row
from dflash_jax.serving.text import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
GREEDY = SamplingParams()
_CANCELLED = "it was cancelled before its end"


class LLM:
    """Generates text from a target, speculated losslessly by a drafter.

    Args:
        target: a folder in Hugging Face layout, a hub id, or "demo".
        drafter: the same; None decodes one token at a time through the same engine.
        progress: called as (stage, done, total) while loading, compiling and generating.
        **options: fields of `ServeConfig`.

    Raises:
        ConfigError, CheckpointError, DownloadError: before anything is compiled.
        MemoryPlanError: it does not fit the device; before anything is loaded.
        EngineError: the device ran out of memory all the same.
    """

    def __init__(
        self,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ):
        serve = serve_config(options)
        pair = read_pair(target, drafter, serve)
        resolved = resolve_pair(pair, serve)
        check_weights(pair, resolved)
        self.tokenizer: Tokenizer | None = read_tokenizer(pair.target)
        check_tokenizers(self.tokenizer, pair.drafter)
        platform = used_devices(serve)[0].platform
        plan = engine_plan(pair, serve, on_platform(resolved, serve, platform))
        refuse_unfit(plan)
        self.config: ResolvedConfig = plan.config
        self._progress = progress
        compiled = None
        if not skips_estimation():
            compiled = compile_pair(self.config, pair, progress)
            plan = plan.with_measured(measure(compiled))
            refuse_unfit(plan)
            if plan.config.num_pages != self.config.num_pages:
                # What the programs need came off the pool.
                self.config = plan.config
                compiled = compile_pair(self.config, pair, progress)
        self.plan: MemoryPlan = plan
        logger.info("%s", plan)
        with explained("the weights", sum(plan.inputs.weights), plan):
            models = load_pair(self.config, pair, progress)
        announce(plan, memory_now(serve))
        arenas = plan.footprint.kv_arena + plan.footprint.context_arena
        arenas += 0 if plan.pool is None else plan.pool.nbytes
        with explained("the arenas", arenas, plan):
            self._engine = Engine(self.config, *models, compiled=compiled, progress=progress)
        self._batch = Batch(self._engine)
        known = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        self.eos_token_ids: tuple[int, ...] = tuple(
            sorted({*self.config.target.eos_token_ids, *known})
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[Completion]:
        """Answers every prompt; a list in request order.

        Args:
            prompts: text or token ids, one or many.
            params: one for all, or one each.

        A request that cannot be served comes back as finish_reason "abort" with `error` set and
        harms no other one; when none of the call's requests can be served, its error is raised.

        Raises:
            RequestError: no request of the call can be served, or `params` has another length.
        """
        asked = listed(prompts)
        many = [params] * len(asked) if isinstance(params, SamplingParams) else list(params)
        if len(many) != len(asked):
            raise RequestError(
                f"{len(asked)} prompts came with {len(many)} SamplingParams: give one for all or "
                "one each"
            )
        checked = [self._intake.check(*pair) for pair in zip(asked, many, strict=True)]
        refusals = [ids for ids in checked if isinstance(ids, RequestError)]
        if refusals and len(refusals) == len(checked):
            raise refusals[0]
        answers = [
            ids if isinstance(ids, RequestError) else self._submit(ids, one)
            for ids, one in zip(checked, many, strict=True)
        ]
        self._run([rows for rows in answers if not isinstance(rows, RequestError)])
        return [
            refused(rows) if isinstance(rows, RequestError) else self.completion(rows)
            for rows in answers
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[Completion]:
        """Answers one conversation or many; a list in request order.

        Raises:
            RequestError: the model has no chat template, or as `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_ids(one) for one in conversations], params)  # type: ignore[arg-type]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        if self.tokenizer is None:
            raise RequestError("this target's folder has no tokenizer.json: give token ids")
        return self.tokenizer.chat_ids(messages)

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY
    ) -> Generator[str, None, Completion]:
        """Text pieces of one answer as they are committed; returns its `Completion` at the end.

        Leaving the loop early frees the slot.

        Raises:
            RequestError: the request cannot be served, or the target has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("streaming text needs the target's tokenizer.json: use generate")
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream is one answer; use generate for many")
        return self._stream(self._intake.ids(prompt, params), params)

    def _stream(self, ids: list[int], params: SamplingParams) -> Generator[str, None, Completion]:
        # Queued by the first `next`: a generator that never starts never cleans up.
        rows = self._submit(ids, params)
        output, sent = rows[0].output, 0
        try:
            # Another reader's step may have moved this row on, to its end even.
            while sent < len(output.text) or output.finish_reason is None:
                if sent == len(output.text):
                    self._batch.step()
                piece = output.text[sent:]
                sent += len(piece)
                if piece:
                    yield piece
            return self.completion(rows)
        finally:
            self._batch.cancel(rows[0], _CANCELLED)

    def submit(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, timeout: float | None = None
    ) -> list[Row]:
        """Queues a request for `step` and returns its n answers to be.

        Args:
            timeout: seconds from now after which it is aborted; None = never.

        Raises:
            RequestError: it cannot be served.
        """
        return self._submit(self._intake.ids(prompt, params), params, timeout)

    def step(self) -> list[Update]:
        """Runs one step for everybody: chunks of prompts and one dispatch of rounds.

        Returns:
            What became final, and for whom.

        Raises:
            EngineError: the engine is beyond repair; every open request has been aborted.
        """
        return self._batch.step()

    def cancel(self, row: Row) -> None:
        """Ends an answer wherever it is and frees its slot at once; after its end, does nothing."""
        self._batch.cancel(row, _CANCELLED)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self._batch.busy

    def load(self) -> Load:
        """Who waits and runs now, and what was done since the start."""
        return self._batch.load()

    def completion(self, rows: Sequence[Row]) -> Completion:
        """The `Completion` of a request, whose answers are `rows`."""
        choices = [row.completion() for row in rows]
        choices[0].choices = choices
        return choices[0]

    @property
    def arenas(self) -> Arenas:
        """The preallocated arenas, as the latest program left them; donated by the next call."""
        return self._engine.arenas

    @property
    def programs(self) -> Mapping[str, jax.stages.Compiled]:
        """The compiled programs by name."""
        return self._engine.programs

    @property
    def compiles_in_service(self) -> int:
        """Compilations since this engine was ready, by anything in the process; 0 is right."""
        return self._engine.compiles.count

    def last_round(self, slot: int) -> LastRound | None:
        """The latest round of a slot, None before its first."""
        return self._batch.last_rounds.get(slot)

    @property
    def _intake(self) -> Intake:
        return Intake(self.config, self.tokenizer, self.eos_token_ids)

    def _submit(
        self, ids: list[int], params: SamplingParams, timeout: float | None = None
    ) -> list[Row]:
        rows = self._intake.rows(ids, params, timeout)
        for row in rows:
            self._batch.submit(row)
        return rows

    def _run(self, answers: Sequence[Sequence[Row]]) -> None:
        rows, done = [row for answer in answers for row in answer], 0
        mine = set(rows)
        try:
            # Looking at all rows after every step would take the square of a long list's time.
            while done < len(rows):
                ended = sum(
                    row in mine and piece.finish_reason is not None
                    for row, piece in self._batch.step()
                )
                done += ended
                if self._progress is not None and ended:
                    self._progress("generate", done, len(rows))
        finally:
            # Interrupted or failed: nothing of this call stays behind in a slot.
            for row in rows:
                self._batch.cancel(row, _CANCELLED)
