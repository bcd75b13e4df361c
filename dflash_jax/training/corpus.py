"""Prompts, and the target's own answers to them, in sharded JSONL files.

A drafter learns the target's answers, not anybody else's: prompts come from a file or from the
target itself, answers from an engine that the caller hands in. One line an answer; a manifest says
what the shards were made with. Tokens to features is `features.py`.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class Prompt(NamedTuple):
    """One conversation up to the assistant's turn: token ids under the target's chat template."""

    ids: list[int]
    source: str


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
        max_period, min_loop_tokens: an answer is a loop from where its tail repeats with a period
            of at most `max_period` tokens, three times and for at least `min_loop_tokens`.
        shard_size: answers of a shard.
    """

    max_prompt_tokens: int = 256
    max_answer_tokens: int = 256
    min_answer_tokens: int = 10
    max_period: int = 48
    min_loop_tokens: int = 24
    shard_size: int = 1024


def prompt_key(ids: Sequence[int]) -> str:
    """Names a prompt by its tokens; prompts of one key are answered once."""
    return hashlib.sha1(b",".join(str(i).encode() for i in ids)).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prompts_from_file(path: Path, tokenizer: Any) -> Iterator[Prompt]:
    """First user turns of a JSONL file whose lines have `turns` (and perhaps `source`).

    Raises:
        RequestError: a line without `turns`, or a file without a line.
    """
    count = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turn = record["turns"][0]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise RequestError(
                f'{path} line {number} has no user turn: each line is {{"turns": ["..."]}}'
            ) from error
        count += 1
        ids = tokenizer.chat_ids([{"role": "user", "content": turn}], add_generation_prompt=True)
        yield Prompt(list(ids), str(record.get("source", path.stem)))
    if not count:
        raise RequestError(f'{path} has no prompt: give a JSONL file of {{"turns": ["..."]}}')


def user_turn(tokenizer: Any, seed: str = "") -> tuple[list[int], list[int]]:
    """Ids before and after the user's text of a one-turn conversation, cut around a marker.

    The part before, plus `seed`, is what a target continues to make up a prompt itself.
    """
    marker = "@@@"
    ids = tokenizer.chat_ids([{"role": "user", "content": marker}], add_generation_prompt=True)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    before, found, after = text.partition(marker)
    if not found:
        raise ConfigError("the chat template drops the user's text: no prompt can be made up")
    encode = tokenizer.encode
    return (
        list(encode(before + seed, add_special_tokens=False)),
        list(encode(after, add_special_tokens=False)),
    )


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
    end = loop_start(ids, options.max_period, options.min_loop_tokens)
    if end is not None:
        ids, finish_reason = ids[:end], "loop"
    if len(ids) < options.min_answer_tokens:
        counts["too short"] += 1
        return None
    counts[finish_reason] += 1
    return Answer(prompt_key(prompt.ids), prompt.source, prompt.ids, list(ids), finish_reason)


def write_corpus(
    folder: Path,
    prompts: Sequence[Prompt],
    answer: Callable[[Sequence[Prompt]], Sequence[tuple[list[int], str]]],
    options: CorpusOptions,
) -> Counter[str]:
    """Answers every distinct prompt and writes shards; goes on where an earlier run stopped.

    A shard covers a fixed range of the distinct prompts and appears when it is whole, so a kill
    loses at most one.

    Args:
        answer: token ids and finish reason of each prompt, in order.

    Returns:
        Counts of this run by outcome.

    Raises:
        ConfigError: the folder was begun with other prompts or options; names the difference.
    """
    counts: Counter[str] = Counter()
    chosen = _distinct(prompts, options, counts)
    folder.mkdir(parents=True, exist_ok=True)
    _begin(folder, chosen, options)
    for begin in range(0, len(chosen), options.shard_size):
        path = folder / f"corpus-{begin // options.shard_size:05d}.jsonl"
        if path.is_file():
            continue
        group = chosen[begin : begin + options.shard_size]
        made = [
            keep(prompt, ids, reason, options, counts)
            for prompt, (ids, reason) in zip(group, answer(group), strict=True)
        ]
        _write_lines(path, [a for a in made if a is not None])
        log.info("%s: %s", path.name, dict(counts))
    return counts


def shard_paths(folder: Path) -> list[Path]:
    """The whole shards of a corpus, in order.

    Raises:
        RequestError: there is none.
    """
    paths = sorted(folder.glob("corpus-*.jsonl"))
    if not paths:
        raise RequestError(f"{folder} has no corpus-*.jsonl: generate answers first")
    return paths


def read_shard(path: Path) -> Iterator[Answer]:
    """The answers of one shard."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Answer(**json.loads(line))


def _distinct(
    prompts: Sequence[Prompt], options: CorpusOptions, counts: Counter[str]
) -> list[Prompt]:
    chosen: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(prompt.ids) > options.max_prompt_tokens:
            counts["prompt too long"] += 1
        elif prompt_key(prompt.ids) in chosen:
            counts["prompt repeated"] += 1
        else:
            chosen[prompt_key(prompt.ids)] = prompt
    return list(chosen.values())


def _begin(folder: Path, prompts: Sequence[Prompt], options: CorpusOptions) -> None:
    keys = ",".join(prompt_key(p.ids) for p in prompts)
    manifest = {
        "options": dataclasses.asdict(options),
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(keys.encode()).hexdigest(),
    }
    path = folder / MANIFEST
    if not path.is_file():
        _write_text(path, json.dumps(manifest, indent=2) + "\n")
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    differences = [
        f"{key}: {begun.get(key)} then, {manifest[key]} now"
        for key in manifest
        if begun.get(key) != manifest[key]
    ]
    if differences:
        raise ConfigError(
            f"{folder} was begun with something else ({'; '.join(differences)}): use the same "
            "prompts and options, or another folder"
        )


def _write_lines(path: Path, answers: Sequence[Answer]) -> None:
    _write_text(path, "".join(json.dumps(a._asdict()) + "\n" for a in answers))


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
