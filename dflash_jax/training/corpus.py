"""The target's own answers to prompts, in sharded JSONL files.

A drafter learns the target's answers, not anybody else's: an engine that the caller hands in makes
them. One line an answer. Of a conversation of several user turns every answer is learned, and each
is a line of its own, whose prompt is what a server would be asked at that turn: only `answer_ids`
of a line are learned, so no answer is learned twice, and none as part of a later prompt. Prompts
come from `prompts.py` and `made_up.py`, the folder is `shards.py`'s, tokens to features is
`features.py`.
"""

import dataclasses
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.training.checks import too_low
from dflash_jax.training.prompts import Prompt
from dflash_jax.training.shards import Shards, read_lines

log = logging.getLogger(__name__)

_STEM = "corpus"
_SEED_BITS = 32
_LEAST = {
    "max_prompt_tokens": 1,
    "max_answer_tokens": 1,
    "min_answer_tokens": 1,
    "max_period": 1,
    "min_loop_tokens": 1,
    "shard_size": 1,
    "answer_temperature": 0,
    "seed": 0,
}


class Answer(NamedTuple):
    """A line of a shard. `finish_reason`: stop (ended itself), length or loop (cut)."""

    key: str
    source: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """How answers are made and which are kept.

    Attributes:
        max_prompt_tokens: longer prompts are left out (counted).
        max_answer_tokens: answers are cut there.
        min_answer_tokens: shorter answers are left out (counted).
        keep_cut: whether answers cut by length or as a loop are kept up to the cut.
        max_period, min_loop_tokens: an answer is a loop from where its tail repeats with a period
            of at most `max_period` tokens, three times and for at least `min_loop_tokens`.
        shard_size: prompts of a shard (its later turns come on top).
        answer_temperature: 0 = greedy.
        greedy_share: share of the prompts, by their keys, that are answered greedily whatever
            `answer_temperature` is: a drafter for both kinds of requests learns both.
        seed: of sampled answers; each prompt has its own, made from this and its tokens.

    Raises:
        ConfigError: numbers that no corpus can have; names every one.
    """

    max_prompt_tokens: int = 256
    max_answer_tokens: int = 256
    min_answer_tokens: int = 10
    keep_cut: bool = True
    max_period: int = 48
    min_loop_tokens: int = 24
    shard_size: int = 1024
    answer_temperature: float = 0.0
    greedy_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        findings = too_low(vars(self), _LEAST)
        if not math.isfinite(self.answer_temperature):
            findings.append(f"answer_temperature {self.answer_temperature}: a finite number")
        if not 0 <= self.greedy_share <= 1:
            findings.append(f"greedy_share {self.greedy_share}: must be between 0 and 1")
        if self.min_answer_tokens > self.max_answer_tokens:
            findings.append(
                f"min_answer_tokens {self.min_answer_tokens} is above max_answer_tokens "
                f"{self.max_answer_tokens}: every answer would be too short"
            )
        if findings:
            raise ConfigError("; ".join(findings))


AnswerAll = Callable[[Sequence[Prompt]], Sequence[tuple[list[int], str]]]
"""Token ids and finish reason of each prompt, in order."""

Follow = Callable[[Prompt, Sequence[int]], Prompt | None]
"""The next turn's prompt when a prompt was answered; None after the last."""


def prompt_seed(prompt: Prompt, seed: int) -> int:
    """The seed of a prompt's answer: the same wherever and whenever it is answered."""
    return _hashed(f"{seed} {prompt.key}")


def prompt_temperature(prompt: Prompt, options: CorpusOptions) -> float:
    """The temperature of a prompt's answer: 0 for a fixed choice of `greedy_share` of them."""
    place = _hashed(f"{options.seed} greedy {prompt.key}") / 2**_SEED_BITS
    return 0.0 if place < options.greedy_share else options.answer_temperature


def loop_start(ids: Sequence[int], max_period: int, min_tokens: int) -> int | None:
    """Index after which an answer only repeats itself, three periods in; None if it does not.

    Looks at every prefix: the first one whose last max(3 p, min_tokens) tokens have period p.
    """
    run = [0] * (max_period + 1)  # how many tokens in a row equal the one p before
    for index, token in enumerate(ids):
        for period in range(1, min(max_period, index) + 1):
            run[period] = run[period] + 1 if ids[index - period] == token else 0
            if run[period] + period >= max(3 * period, min_tokens):
                return index + 1
    return None


def keep(
    prompt: Prompt, ids: list[int], finish_reason: str, options: CorpusOptions, counts: Counter[str]
) -> Answer | None:
    """The answer to store, cut at a loop, or None; every outcome is counted."""
    if finish_reason not in ("stop", "length"):
        counts["failed"] += 1
        return None
    end = loop_start(ids, options.max_period, options.min_loop_tokens)
    if end is not None:
        ids, finish_reason = ids[:end], "loop"
    if len(ids) < options.min_answer_tokens:
        counts["too short"] += 1
        return None
    counts[finish_reason] += 1
    if finish_reason != "stop" and not options.keep_cut:
        return None
    return Answer(prompt.key, prompt.source, prompt.ids, list(ids), finish_reason)


def write_corpus(
    folder: Path,
    prompts: Sequence[Prompt],
    answer: AnswerAll,
    options: CorpusOptions,
    *,
    follow: Follow | None = None,
    made_from: Mapping[str, Any] | None = None,
) -> Counter[str]:
    """Answers every distinct prompt and writes shards; goes on where an earlier run stopped.

    A shard covers a fixed range of the distinct prompts and appears when it is whole, so a kill
    loses at most one.

    Args:
        follow: makes the later turns of a conversation; None: first turns only.
        made_from: what else decides the answers (the target); part of the manifest.

    Returns:
        Counts by outcome, of earlier runs too.

    Raises:
        ConfigError: the folder was begun with other prompts, options or `made_from`.
        RequestError: every prompt is too long, or no answer is left.
        CheckpointError: a shard cannot be written, or was changed.
    """
    counts: Counter[str] = Counter()
    chosen = _distinct(prompts, options, counts)
    keys = ",".join(prompt.key for prompt in chosen)
    record = {
        "prompts": len(chosen),
        "prompts_sha256": hashlib.sha256(keys.encode()).hexdigest(),
    }
    shards = Shards(folder, _STEM, options, record | dict(made_from or {}))
    for index in range(-(-len(chosen) // options.shard_size)):
        if shards.is_whole(index):
            continue
        group = chosen[index * options.shard_size : (index + 1) * options.shard_size]
        outcomes: Counter[str] = Counter()
        made = _answered(group, answer, follow, options, outcomes)
        shards.write(index, [one._asdict() for one in made], outcomes)
        log.info("%s: %s", shards.path(index).name, dict(outcomes))
    counts += shards.counts
    if not any(path.stat().st_size for path in folder.glob(f"{_STEM}-*.jsonl")):
        raise RequestError(
            f"none of {len(chosen)} prompts has an answer to learn ({dict(counts)}): allow longer "
            "answers (max_answer_tokens) or shorter ones (min_answer_tokens)"
        )
    return counts


def shard_paths(folder: Path) -> list[Path]:
    """The whole shards of a corpus that have an answer, in order.

    Raises:
        RequestError: there is none.
    """
    paths = [path for path in sorted(folder.glob(f"{_STEM}-*.jsonl")) if path.stat().st_size]
    if not paths:
        raise RequestError(f"{folder} has no {_STEM}-*.jsonl: generate answers first")
    return paths


def read_shard(path: Path) -> Iterator[Answer]:
    """The answers of one shard."""
    return (Answer(**line) for line in read_lines(path))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: _SEED_BITS // 8], "big")


def _answered(
    group: Sequence[Prompt],
    answer: AnswerAll,
    follow: Follow | None,
    options: CorpusOptions,
    counts: Counter[str],
) -> list[Answer]:
    """All answers of some conversations, turn by turn: every first turn, then every second."""
    made: list[Answer] = []
    while group:
        following = []
        for prompt, (ids, reason) in zip(group, answer(group), strict=True):
            kept = keep(prompt, ids, reason, options, counts)
            made += [] if kept is None else [kept]
            if not prompt.later or follow is None:
                continue
            looped = loop_start(ids, options.max_period, options.min_loop_tokens) is not None
            later = None if reason != "stop" or looped else follow(prompt, ids)
            if later is None:  # nobody goes on talking to half an answer
                counts["turn after a cut answer"] += len(prompt.later)
            elif len(later.ids) > options.max_prompt_tokens:
                counts["turn too long"] += 1 + len(later.later)
            else:
                following.append(later)
        group = following
    return made


def _distinct(
    prompts: Sequence[Prompt], options: CorpusOptions, counts: Counter[str]
) -> list[Prompt]:
    chosen: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(prompt.ids) > options.max_prompt_tokens:
            counts["prompt too long"] += 1
        elif prompt.key in chosen:
            counts["prompt repeated"] += 1
        else:
            chosen[prompt.key] = prompt
    _say_too_long(prompts, counts["prompt too long"], options.max_prompt_tokens)
    return list(chosen.values())


def _say_too_long(prompts: Sequence[Prompt], count: int, allowed: int) -> None:
    if not count:
        return
    shortest = min(len(prompt.ids) for prompt in prompts)
    if count == len(prompts):
        raise RequestError(
            f"all {count} prompts have more than max_prompt_tokens={allowed} tokens, {shortest} at "
            "least: raise max_prompt_tokens, or give shorter prompts"
        )
    log.warning(
        "%d of %d prompts have more than max_prompt_tokens=%d tokens and are left out",
        count,
        len(prompts),
        allowed,
    )
