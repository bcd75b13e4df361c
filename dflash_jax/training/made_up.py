"""Prompts that the target writes itself: it continues its own user turn, empty or begun.

Source: Magpie, 2406.08464. The text that it writes is put through the chat template like any other
user's, so an answered prompt is what a server would be asked.
"""

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import ConfigError
from dflash_jax.training.answering import AnswerEngine, ChatTokenizer, chat_tokenizer
from dflash_jax.training.checks import too_low
from dflash_jax.training.prompts import Prompt, user_prompt
from dflash_jax.training.shards import Shards, read_lines

_MARKER = "@@@"
_STEM = "prompts"
SOURCE = "made up"
_LEAST = {"made_up": 0, "min_tokens": 1, "temperature": 0, "seed": 0, "shard_size": 1}


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """Where prompts come from besides the file.

    Attributes:
        made_up: how many prompts the target makes up (before repeated ones are dropped).
        seeds: beginnings of user turns that the target continues, taken in turn.
        min_tokens: shorter made-up prompts are dropped, and those that did not end.
        temperature: at which they are sampled.
        seed: of the first one; each has its own.
        shard_size: prompts of a shard; a kill loses at most one shard.

    Raises:
        ConfigError: numbers that cannot be, or no beginning; names every one.
    """

    made_up: int = 0
    seeds: tuple[str, ...] = ("",)
    min_tokens: int = 5
    temperature: float = 1.0
    seed: int = 0
    shard_size: int = 1024

    def __post_init__(self) -> None:
        findings = too_low(vars(self), _LEAST)
        if not math.isfinite(self.temperature):
            findings.append(f"temperature {self.temperature}: a finite number")
        if not self.seeds:
            findings.append('seeds is empty: ("",) makes prompts up from nothing')
        if findings:
            raise ConfigError("; ".join(findings))


def before_user_text(tokenizer: ChatTokenizer) -> str:
    """What the chat template writes before the text of a first user turn.

    Raises:
        ConfigError: the template drops the user's text.
    """
    ids = tokenizer.chat_ids([{"role": "user", "content": _MARKER}], add_generation_prompt=True)
    before, found, _ = tokenizer.decode(ids, skip_special_tokens=False).partition(_MARKER)
    if not found:
        raise ConfigError("the chat template drops the user's text: no prompt can be made up")
    return before


def make_up_prompts(
    engine: AnswerEngine,
    options: PromptOptions,
    max_tokens: int,
    folder: Path,
    made_from: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts of at most `max_tokens` written tokens; kept in `folder` and made only once.

    Raises:
        ConfigError: no chat template, or a folder begun with other options.
        CheckpointError: a shard cannot be written, or was changed.
    """
    if not options.made_up:
        return []
    tokenizer = chat_tokenizer(engine)
    record = {"max_tokens": max_tokens}
    shards = Shards(folder, _STEM, options, record | dict(made_from or {}))
    made: list[Prompt] = []
    for index in range(-(-options.made_up // options.shard_size)):
        begin = index * options.shard_size
        if not shards.is_whole(index):
            numbers = range(begin, min(begin + options.shard_size, options.made_up))
            texts, counts = _written(engine, tokenizer, options, numbers, max_tokens)
            shards.write(index, [{"text": text} for text in texts], counts)
        lines = read_lines(shards.path(index))
        made += [user_prompt(tokenizer, line["text"], SOURCE) for line in lines]
    return made


def _written(
    engine: AnswerEngine,
    tokenizer: ChatTokenizer,
    options: PromptOptions,
    numbers: Sequence[int],
    max_tokens: int,
) -> tuple[list[str], Counter[str]]:
    """Texts of the prompts of these numbers, dropped ones counted."""
    before = before_user_text(tokenizer)
    begun = [options.seeds[number % len(options.seeds)] for number in numbers]
    asked = [tokenizer.encode(before + seed, add_special_tokens=False) for seed in begun]
    answers = engine.answers(
        asked,
        max_tokens=max_tokens,
        temperatures=[options.temperature] * len(asked),
        seeds=[_seed(options.seed, number) for number in numbers],
    )
    ends, counts, texts = set(tokenizer.eos_token_ids), Counter[str](), []
    for prompt, (ids, reason) in zip(asked, answers, strict=True):
        written = [token for token in ids if token not in ends]
        outcome = "kept" if len(written) >= options.min_tokens else "too short"
        counts[outcome if reason == "stop" else "not ended"] += 1
        if reason == "stop" and outcome == "kept":
            whole = tokenizer.decode([*prompt, *written], skip_special_tokens=False)
            texts.append(whole.removeprefix(before).strip())
    return texts, counts


def _seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed} made up {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
