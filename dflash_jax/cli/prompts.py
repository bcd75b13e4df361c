"""Prompts of `generate`: from the command line, and from a JSONL file.

A prompt is text, token ids, or messages for the chat template. Nothing here knows a tokenizer or a
vocabulary: whether a prompt can be served is said by the engine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import RequestError

FORMS = (
    '"text", [ids], {"prompt": "text" or [ids]}, {"turns": ["first user turn", …]} or '
    '{"messages": [{"role": …, "content": …}]}'
)


class Messages(tuple[Mapping[str, Any], ...]):
    """A conversation, to be laid out by the model's chat template; apart from text and ids."""


Prompt = str | list[int] | Messages


def prompts_from_words(words: Sequence[str], *, token_ids: bool) -> list[Prompt]:
    """The prompts of a command line; with `token_ids` each word holds ids, as in `"1 5 9"`.

    Raises:
        RequestError: a word that does not hold ids.
    """
    return [_ids(word) if token_ids else word for word in words]


def prompts_from_file(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, one a line, in any of `FORMS`; blank lines are passed over.

    Raises:
        RequestError: a line in none of the forms, or no prompt at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}") from error
    prompts = [_prompt(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f"{path} holds no prompt: a line is {FORMS}")
    return prompts


def _ids(word: str) -> list[int]:
    try:
        return [int(part) for part in word.replace(",", " ").split()]
    except ValueError as error:
        raise RequestError(
            f'{word!r} does not hold token ids: give numbers, as in "1 5 9"'
        ) from error


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON ({error}): a line is {FORMS}") from error
    if isinstance(value, dict) and "prompt" in value:
        value = value["prompt"]
    match value:
        case str():
            return value
        case list() if all(type(item) is int for item in value):
            return value
        case {"messages": [_, *_] as messages} if all(isinstance(m, dict) for m in messages):
            return Messages(messages)
        case {"turns": [str() as turn, *_]}:
            return Messages(({"role": "user", "content": turn},))
    raise RequestError(f"{where} holds no prompt: a line is {FORMS}")
