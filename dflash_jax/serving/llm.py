"""`LLM`: a target, a drafter and their engine behind `generate`, `stream` and `chat`.

Orders the start, and three gates before it costs anything: files and options, before JAX starts a
backend; the device's memory; the memory of the programs, compiled from shapes. Then weights load
and arenas are allocated. Requests are checked here, one by one, before they queue; what happens to
them then is `batch.py`'s business. `submit`, `step` and `cancel` are for who runs the loop himself:
`service.py` does.
"""

import logging
import operator
import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dflash_jax.arena.context import ContextArena
from dflash_jax.arena.kv import KVArena
from dflash_jax.arena.sizes import MAX_ENDS
from dflash_jax.config import ResolvedConfig
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.planning.budget import skips_estimation
from dflash_jax.planning.measured import measure
from dflash_jax.planning.options import serve_config
from dflash_jax.planning.plan import MemoryPlan, refuse_unfit
from dflash_jax.planning.resolve import on_platform
from dflash_jax.serving.allocation import announce, explained
from dflash_jax.serving.batch import Batch, Update
from dflash_jax.serving.counters import Load
from dflash_jax.serving.engine import Engine, Progress, compile_engine
from dflash_jax.serving.flight import LastRound
from dflash_jax.serving.output import Output
from dflash_jax.serving.planner import (
    Pair,
    engine_plan,
    memory_now,
    read_pair,
    resolve_pair,
    used_devices,
)
from dflash_jax.serving.request import MAX_SEED, Completion, SamplingParams, sample_seed
from dflash_jax.serving.row import Row
from dflash_jax.serving.stopping import end_ids
from dflash_jax.serving.text import Tokenizer
from dflash_jax.weights.load import check_files, load_drafter, load_target, unloaded
from dflash_jax.weights.vocabulary import for_target

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
GREEDY = SamplingParams()
_CANCELLED = "it was cancelled before its end"


class Arenas(NamedTuple):
    """The arenas as they are now; `context` is None without a drafter."""

    kv: KVArena
    context: ContextArena | None


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
        _check_files(pair, resolved)
        self.tokenizer: Tokenizer | None = _tokenizer(pair.target)
        _check_tokenizers(self.tokenizer, pair.drafter)
        platform = used_devices(serve)[0].platform
        plan = engine_plan(pair, serve, on_platform(resolved, serve, platform))
        refuse_unfit(plan)
        self.config: ResolvedConfig = plan.config
        self._progress = progress
        compiled = None
        if not skips_estimation():
            compiled = _compile(self.config, pair, progress)
            plan = plan.with_measured(measure(compiled))
            refuse_unfit(plan)
            if plan.config.num_pages != self.config.num_pages:
                # What the programs need came off the pool.
                self.config = plan.config
                compiled = _compile(self.config, pair, progress)
        self.plan: MemoryPlan = plan
        logger.info("%s", plan)
        with explained("the weights", sum(plan.inputs.weights), plan):
            models = _load(self.config, pair, progress)
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
        listed = _listed(prompts)
        many = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        if len(many) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts came with {len(many)} SamplingParams: give one for all or "
                "one each"
            )
        checked = [self._check(*pair) for pair in zip(listed, many, strict=True)]
        refusals = [ids for ids in checked if isinstance(ids, RequestError)]
        if refusals and len(refusals) == len(checked):
            raise refusals[0]
        answers = [
            ids if isinstance(ids, RequestError) else self._submit(ids, one)
            for ids, one in zip(checked, many, strict=True)
        ]
        self._run([rows for rows in answers if not isinstance(rows, RequestError)])
        return [
            _refused(rows) if isinstance(rows, RequestError) else self.completion(rows)
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
        ids = self._check(prompt, params)
        if isinstance(ids, RequestError):
            raise ids
        return self._stream(ids, params)

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
        ids = self._check(prompt, params)
        if isinstance(ids, RequestError):
            raise ids
        return self._submit(ids, params, timeout)

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
        choices = [self._done(row) for row in rows]
        choices[0].choices = choices
        return choices[0]

    @property
    def arenas(self) -> Arenas:
        """The preallocated arenas, as the latest program left them; donated by the next call."""
        return Arenas(self._engine.state.kv, self._engine.state.context)

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

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int] | RequestError:
        try:
            params.check()
            self._check_params(params)
            ids = self._encode(prompt)
            _check_length(ids, params, self.config)
        except RequestError as error:
            return error
        return ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this target's folder has no tokenizer.json: give token ids instead of text"
                )
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise RequestError(f"prompt {prompt!r} is neither text nor a sequence of token ids")
        return [_token_id(token, self.config.target.vocab_size) for token in prompt]

    def _check_params(self, params: SamplingParams) -> None:
        """What the parameters ask of this model.

        Raises:
            RequestError: it has no text, no such id, or too many ends.
        """
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need the target's tokenizer.json: use stop_token_ids")
        ends = end_ids(params, self.eos_token_ids)
        if len(ends) > MAX_ENDS:
            raise RequestError(
                f"{len(ends)} end ids (the model's and stop_token_ids): at most {MAX_ENDS} are "
                "possible; name fewer stop_token_ids"
            )
        for token in params.logit_bias or ():
            _token_id(token, self.config.target.vocab_size)

    def _submit(
        self, ids: list[int], params: SamplingParams, timeout: float | None = None
    ) -> list[Row]:
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        ends = end_ids(params, self.eos_token_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        rows = [
            Row(
                0,
                prompt=ids,
                params=params,
                seed=sample_seed(seed, choice),
                ends=ends,
                output=Output(self.tokenizer, params, ends),
                choice=choice,
                deadline=deadline,
            )
            for choice in range(params.n)
        ]
        for row in rows:
            row.stats.speculation = self.config.speculation if params.speculate else "none"
            row.stats.unqualified = self.config.unqualified
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

    def _done(self, row: Row) -> Completion:
        answer = Completion(
            text=row.output.text,
            token_ids=row.output.token_ids,
            finish_reason=row.finish_reason or "abort",
            prompt_token_ids=row.prompt,
            logprobs=row.output.logprobs,
            stats=row.stats,
            error=row.error,
        )
        answer.choices.append(answer)
        return answer


def _check_files(pair: Pair, config: ResolvedConfig) -> None:
    """Whether the weights to be loaded fit their configs; starts no backend."""
    check_files(pair.target, "target")
    if config.drafter is not None and pair.drafter is not None:
        check_files(pair.drafter, "drafter", vocab_size=config.target.vocab_size)


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None


def _check_tokenizers(target: Tokenizer | None, drafter: Path | None) -> None:
    """A drafter that brings a tokenizer must number tokens as the target does."""
    own = None if drafter is None else _tokenizer(drafter)
    if target is None or own is None:
        return
    first = target.same_ids(own)
    if first is not None:
        raise ConfigError(
            f"the drafter's tokenizer gives id {first} to {own.token(first)!r} and the target's to "
            f"{target.token(first)!r}: choose the drafter of this target"
        )


def _compile(
    config: ResolvedConfig, pair: Pair, progress: Progress | None
) -> Mapping[str, jax.stages.Compiled]:
    """Every program, from shapes alone: nothing is loaded and no arena exists yet."""
    model = unloaded(pair.target, "target", dtype=config.dtype, mesh=config.mesh)
    model.config = config.target
    method = None
    if config.drafter is not None and pair.drafter is not None:
        method = unloaded(pair.drafter, "drafter", dtype=config.dtype, mesh=config.mesh)
        method = for_target(method, model)
    return compile_engine(config, model, method, progress)


def _load(config: ResolvedConfig, pair: Pair, progress: Progress | None) -> tuple[Any, Any]:
    total = 2 if config.drafter is not None else 1
    if progress is not None:
        progress("load", 0, total)
    model = load_target(pair.target, dtype=config.dtype, mesh=config.mesh)
    # The config decides (rope override, served positions), the folder only brought the weights.
    model.config = config.target
    if progress is not None:
        progress("load", 1, total)
    if config.drafter is None or pair.drafter is None:
        return model, None
    method = load_drafter(pair.drafter, dtype=config.dtype, mesh=config.mesh)
    method = for_target(method, model)
    if progress is not None:
        progress("load", 2, total)
    return model, method


def _token_id(token: object, vocab_size: int) -> int:
    try:
        # Takes NumPy's whole numbers and no float, which int() would cut.
        index = -1 if isinstance(token, bool) else operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        index = -1
    if not 0 <= index < vocab_size:
        raise RequestError(
            f"token id {token!r} is outside the vocabulary: whole numbers from 0 to "
            f"{vocab_size - 1} are needed"
        )
    return index


def _check_length(ids: Sequence[int], params: SamplingParams, config: ResolvedConfig) -> None:
    if not ids:
        raise RequestError("the prompt is empty: at least one token is needed")
    total = len(ids) + params.max_tokens
    if total > config.max_seq_len:
        room = config.max_seq_len - len(ids)
        remedy = f"max_tokens <= {room}" if room > 0 else "a shorter prompt"
        raise RequestError(
            f"{len(ids)} prompt tokens + max_tokens={params.max_tokens} = {total} is beyond the "
            f"served length of {config.max_seq_len}: set {remedy}, or start with "
            f"max_seq_len >= {total}"
        )


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    first = prompts[0] if len(prompts) else ()
    single = not isinstance(first, (str, Sequence)) and not hasattr(first, "__len__")
    return [prompts] if single else list(prompts)  # type: ignore[list-item]


def _refused(error: RequestError) -> Completion:
    logger.warning("a request was refused: %s", error)
    refused = Completion("", [], "abort", [], error=str(error))
    refused.choices.append(refused)
    return refused
