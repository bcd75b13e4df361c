"""Conversations up to the turn that the target answers, from a JSONL file.

A line has `turns` (user turns; the target answers each in order, and its answer becomes part of the
next prompt) or `messages` (a conversation as chat endpoints take it; its last user turn is
answered). The chat template is applied by the function that serving uses, to the whole conversation
every turn, so a prompt's ids are exactly what a server would be asked. Prompts that the target
writes itself are `made_up.py`'s; answers are `corpus.py`'s.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.errors import RequestError
from dflash_jax.training.answering import ChatTokenizer

_FORM = 'each line is {"turns": ["..."]} or {"messages": [{"role": "user", "content": "..."}]}'


class Prompt(NamedTuple):
    """One conversation up to the assistant's turn: token ids under the target's chat template.

    Attributes:
        messages: what the ids were made from.
        later: user turns that follow when this one has been answered.
    """

    ids: list[int]
    source: str
    messages: tuple[Mapping[str, str], ...] = ()
    later: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Names a prompt by its tokens and what follows; those of one key are answered once."""
        text = json.dumps([list(self.ids), *self.later])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def user_prompt(tokenizer: ChatTokenizer, text: str, source: str) -> Prompt:
    """A conversation of one user turn."""
    return _prompt(tokenizer, ({"role": "user", "content": text},), source)


def next_turn(tokenizer: ChatTokenizer, prompt: Prompt, answer_ids: Sequence[int]) -> Prompt | None:
    """The prompt after `prompt` was answered, None after the last turn.

    The answer goes back as text and the template is applied anew, as for a client of a server: a
    template that drops the thinking of earlier turns drops it here too.
    """
    if not prompt.later:
        return None
    answer = {"role": "assistant", "content": tokenizer.decode(answer_ids)}
    asked = {"role": "user", "content": prompt.later[0]}
    messages = (*prompt.messages, answer, asked)
    return _prompt(tokenizer, messages, prompt.source, prompt.later[1:])


def prompts_from_file(path: Path, tokenizer: ChatTokenizer) -> Iterator[Prompt]:
    """The conversations of a JSONL file; `source` of a line is kept, else it is the file's name.

    Raises:
        RequestError: no line, or one that is not of the form (with its number and what is wrong).
    """
    count = 0
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        count += 1
        try:
            yield _read(line, path.stem, tokenizer)
        except RequestError as error:
            raise RequestError(f"{path} line {number}: {error}") from error
    if not count:
        raise RequestError(f"{path} has no prompt: {_FORM}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _read(line: str, source: str, tokenizer: ChatTokenizer) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"no valid JSON ({error}); {_FORM}") from error
    given = [key for key in ("turns", "messages") if isinstance(record, dict) and key in record]
    if len(given) != 1:
        raise RequestError(f"{len(given)} of turns and messages, not 1; {_FORM}")
    source = str(record.get("source", source))
    if given == ["messages"]:
        return _prompt(tokenizer, _conversation(record["messages"]), source)
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        raise RequestError("turns is no list of user turns (texts that are not blank)")
    first = {"role": "user", "content": turns[0]}
    return _prompt(tokenizer, (first,), source, tuple(turns[1:]))


def _conversation(messages: Any) -> tuple[dict[str, str], ...]:
    """Checked messages up to the last user turn; an answer after it is somebody else's: dropped."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is no list of messages")
    found = tuple(_message(place, message) for place, message in enumerate(messages))
    roles = [message["role"] for message in found]
    spoken = roles[1:] if roles[0] == "system" else roles
    for place, role in enumerate(spoken):
        expected = ("user", "assistant")[place % 2]
        if role != expected:
            place += len(roles) - len(spoken)
            raise RequestError(
                f"message {place} has the role {role!r} where {expected!r} is due: user and "
                "assistant take turns, user first, after at most one system message"
            )
    if not spoken:
        raise RequestError("messages has no user turn that could be answered")
    return found if spoken[-1] == "user" else found[:-1]


def _message(place: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not _is_text(message.get("content")):
        raise RequestError(f"message {place} has no text in content")
    role = message.get("role")
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"message {place} has the role {role!r}: system, user or assistant")
    return {"role": role, "content": message["content"]}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _prompt(
    tokenizer: ChatTokenizer,
    messages: tuple[Mapping[str, str], ...],
    source: str,
    later: tuple[str, ...] = (),
) -> Prompt:
    ids = tokenizer.chat_ids(messages, add_generation_prompt=True)
    return Prompt(list(ids), source, messages, later)
