"""Acceptance by the decoding round itself: held-out prompts, answered with a run's parameters.

The programs are the engine's own (`decoding/programs.py`), greedy, in a batch of their own. The
teacher-forced figure over many anchors is `held_out.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.arena.sizes import MAX_ENDS
from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig
from dflash_jax.decoding.opening import greedy_opening
from dflash_jax.decoding.programs import Program, compile_program, list_programs, split_model
from dflash_jax.decoding.report import NOT_RUN, RoundReport
from dflash_jax.decoding.round import padded_chunk
from dflash_jax.decoding.state import EngineState, init_state
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.planning.buckets import chunk_buckets
from dflash_jax.planning.resolve import on_platform, resolve
from dflash_jax.training.corpus import CorpusOptions, loop_start
from dflash_jax.training.documents import Document
from dflash_jax.training.step import Params, with_params
from dflash_jax.weights.vocabulary import for_target, with_draft_vocabulary

_ROWS = 8  # prompts answered at a time


class RealAcceptance(NamedTuple):
    """Pooled figures: tokens committed by rounds over rounds, so long answers count for more.

    Attributes:
        accepted: acceptance length of all rounds.
        without_loops: of the rounds that begin before their answer only repeats itself (where
            `loop_start` cuts an answer of the corpus); 0 if there is none.
        rounds, tokens: of all answers; the first token of an answer is the prefill's.
        looping_tokens: tokens after that place.
    """

    accepted: float
    without_loops: float
    rounds: int
    tokens: int
    looping_tokens: int


class Answered(NamedTuple):
    """One answer: its ids (an end id included) and the tokens that each round gave to it."""

    ids: list[int]
    lengths: list[int]


def pooled(answers: Sequence[Answered]) -> RealAcceptance:
    """Figures of some answers."""
    rule = CorpusOptions()
    every, before, looping = [], [], 0
    for ids, lengths in answers:
        found = loop_start(ids, rule.max_period, rule.min_loop_tokens)
        start = len(ids) if found is None else found
        begins = np.cumsum([1, *lengths])[:-1]
        every += lengths
        before += [n for n, at in zip(lengths, begins, strict=True) if at < start]
        looping += len(ids) - start
    tokens = sum(len(ids) for ids, _ in answers)
    return RealAcceptance(_mean(every), _mean(before), len(every), tokens, looping)


def _mean(lengths: Sequence[int]) -> float:
    return float(np.mean(lengths)) if lengths else 0.0


def chosen_prompts(held: Sequence[Document], count: int) -> list[Document]:
    """`count` of the held-out documents, evenly over all of them; the same ones every time."""
    places = np.linspace(0, len(held), min(count, len(held)), endpoint=False, dtype=int)
    return [held[place] for place in places]


class RealRounds:
    """Rounds of one target with changing parameters of one drafter; compiled at the first call.

    Args:
        abstract: the drafter's shapes.
        documents: whose prompts are answered; an end id of theirs ends an answer, like the
            target's.
        max_tokens: of an answer.
        allowed: ids of a reduced draft vocabulary; None: all.

    Raises:
        ConfigError: a drafter that was made for another target.
    """

    def __init__(
        self,
        target: Target,
        abstract: DFlashDrafter,
        documents: Sequence[Document],
        max_tokens: int,
        allowed: np.ndarray | None = None,
    ):
        self.target, self.abstract, self.allowed = target, abstract, allowed
        self.prompts = [d.ids[: d.answer_start].tolist() for d in documents]
        ended = {int(d.ids[-1]) for d in documents if d.ended}
        self.ends = frozenset([*target.config.eos_token_ids, *sorted(ended)][:MAX_ENDS])
        count = None if allowed is None else len(allowed)
        served = dataclasses.replace(abstract.config, draft_vocab_size=count)
        self.config = _resolved(target, served, self.prompts, max_tokens)
        self.max_tokens = max_tokens
        self.programs: dict[str, Program] = {}
        self.compiled: dict[str, jax.stages.Compiled] = {}
        self.empty = jax.jit(lambda: init_state(self.config))

    def measure(self, params: Params) -> RealAcceptance:
        """Answers every prompt with the drafter of these parameters, as it would be served."""
        return pooled(self.answers(params))

    def answers(self, params: Params) -> list[Answered]:
        """The answers, in the order of the prompts."""
        drafter = self._as_served(params)
        leaves = (split_model(self.target).leaves, split_model(drafter).leaves)
        if not self.programs:
            models = split_model(self.target), split_model(drafter)
            self.programs = {p.name: p for p in list_programs(self.config, *models)}
        rows = self.config.max_batch_size
        groups = [self.prompts[i : i + rows] for i in range(0, len(self.prompts), rows)]
        return [answer for group in groups for answer in self._group(leaves, group)]

    def _as_served(self, params: Params) -> DFlashDrafter:
        """The drafter in the target's dtype, where the target is."""
        table = self.target.embedding
        moved = {name: value.astype(table.dtype) for name, value in params.items()}
        drafter = with_params(self.abstract, jax.device_put(moved, table.sharding))
        if self.allowed is None:
            return drafter
        return for_target(with_draft_vocabulary(drafter, self.allowed), self.target)

    def _group(self, leaves: Any, prompts: Sequence[list[int]]) -> list[Answered]:
        state = self.empty()
        answers = []
        for slot, ids in enumerate(prompts):
            limit = min(self.max_tokens, self.config.max_seq_len - len(ids))
            opening = greedy_opening(slot, limit, self.ends, self.target.config.vocab_size)
            state = self._run("open", state, opening)
            state, first = self._prefill(leaves, state, slot, ids)
            answers.append(Answered([first], []))
        active = np.arange(self.config.max_batch_size) < len(prompts)
        while active.any():
            name = f"round-{len(active)}-greedy"
            state, packed = self._run(name, *leaves, state, jnp.array(active))
            for report in np.asarray(packed):
                self._take_in(RoundReport.unpack(report, self.config.max_draft_len), answers)
            for slot, answer in enumerate(answers):
                active[slot] = not self._ended(answer, len(prompts[slot]))
        return answers

    def _prefill(
        self, leaves: Any, state: EngineState, slot: int, ids: Sequence[int]
    ) -> tuple[EngineState, int]:
        sizes = chunk_buckets(self.config.max_seq_len, self.config.max_num_tokens)
        chosen = 0
        for begin in range(0, len(ids), sizes[-1]):
            chunk = ids[begin : begin + sizes[-1]]
            last = begin + len(chunk) == len(ids)
            prompt = padded_chunk(slot, chunk, sizes, last=last)
            state, packed = self._run(f"prefill-{prompt.ids.shape[1]}", *leaves, state, prompt)
            chosen = int(RoundReport.unpack(np.asarray(packed), 0).chosen[0, 0])
        return state, chosen

    def _take_in(self, report: RoundReport, answers: Sequence[Answered]) -> None:
        """Adds what a round gave; an end id and the limit cut it, as the engine's host does."""
        for slot, answer in enumerate(answers):
            accepted = int(report.num_accepted_drafts[slot])
            if accepted == NOT_RUN:
                continue
            new = report.chosen[slot, : accepted + 1].tolist()
            end = next((i + 1 for i, token in enumerate(new) if token in self.ends), len(new))
            new = new[: min(end, self.max_tokens - len(answer.ids))]
            answer.ids.extend(new)
            answer.lengths.append(len(new))

    def _ended(self, answer: Answered, prompt_tokens: int) -> bool:
        limit = min(self.max_tokens, self.config.max_seq_len - prompt_tokens)
        return len(answer.ids) >= limit or answer.ids[-1] in self.ends or answer.ids[-1] < 0

    def _run(self, name: str, *arguments: Any) -> Any:
        if name not in self.compiled:
            self.compiled[name] = compile_program(self.programs[name])
        return self.compiled[name](*arguments)


def _resolved(
    target: Target, drafter: DrafterConfig, prompts: Sequence[list[int]], max_tokens: int
) -> ResolvedConfig:
    longest = max(len(ids) for ids in prompts) + max_tokens
    serve = ServeConfig(
        max_seq_len=min(longest, target.config.max_position_embeddings),
        max_batch_size=min(len(prompts), _ROWS),
        dtype=str(target.embedding.dtype),
    )
    platform = next(iter(target.embedding.devices())).platform
    return on_platform(resolve(serve, target.config, drafter), serve, platform)
