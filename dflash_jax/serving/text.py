"""Text to token ids and back: a checkpoint's tokenizer, and the text of a growing answer.

Everything that becomes ids, raw text or chat, passes through one function, so both follow the same
rules for special tokens. Nothing here knows about requests or batches (`engine.py`), nor how a
conversation is laid out as text (`chat_template.py`).
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from dflash_jax.errors import CheckpointError, RequestError
from dflash_jax.serving.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are no character, or not yet one."""

_CONTEXT_TOKENS = 6
"""Tokens that a `TextStream` keeps of what it has handed out; see there for why six."""


class Tokenizer:
    """The tokenizer of one checkpoint folder: encoding, decoding, chat, and its end ids."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ):
        """`special_tokens` maps `bos_token`, `eos_token`, … to their text.

        `eos_token_ids` are those of the model's configs; the id of `eos_token` is added to them.
        """
        raw.no_truncation()  # tokenizer.json may carry the settings of a training run
        raw.no_padding()
        self._raw = raw
        self._tokens = {index: token for token, index in raw.get_vocab().items()}
        self._special_tokens = dict(special_tokens or {})
        self._chat_source, self._chat = chat_template, None
        own_eos = raw.token_to_id(self._special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = tuple(
            sorted({*eos_token_ids, *([] if own_eos is None else [own_eos])})
        )
        """Ids that end an answer, ascending: the union of all the places that name one."""
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids that decoding hides."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json, and where they are there tokenizer_config.json,
        chat_template.jinja, generation_config.json and config.json.

        Raises `CheckpointError` if tokenizer.json is missing or a file cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; add the one of the model, or pass token ids "
                "instead of text"
            )
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise CheckpointError(f"{path} is not a valid tokenizer file: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        model_configs = [folder / "config.json", folder / "generation_config.json"]
        tokenizer = cls(
            raw,
            special_tokens=_special_tokens(config),
            chat_template=_chat_template(folder, config),
            eos_token_ids=[index for path in model_configs for index in _eos_ids(path)],
        )
        logger.info("answers of %s end with any of the ids %s", folder, tokenizer.eos_token_ids)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The highest id plus one; the model's own table may be padded beyond it."""
        return max(self._tokens, default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._chat_source is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. The texts of special tokens in it become those tokens.

        With `add_special_tokens` the tokenizer's own frame (a start token, for some models) is put
        around. Raises `RequestError` for a string that is not valid Unicode.
        """
        try:
            return self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"a prompt must be valid Unicode text: {error}") from error

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation. The template writes every special token, nothing is added to it.

        `variables` are handed to the template (`enable_thinking=False`, `tools=[...]`). Raises
        `RequestError` if the model has no template or the template refuses the messages.
        """
        if self._chat_source is None:
            raise RequestError(
                "this model has no chat template (chat_template in tokenizer_config.json, or "
                "chat_template.jinja); use generate() with the text of the prompt instead"
            )
        if self._chat is None:
            self._chat = ChatTemplate(self._chat_source, self._special_tokens)
        text = self._chat.render(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; those without a token (a padded table has some) give nothing."""
        return self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, index: int) -> str | None:
        """The vocabulary entry of an id as the file spells it, `None` where there is none."""
        return self._tokens.get(index)

    def same_ids(self, other: "Tokenizer") -> int | None:
        """The first id for which both have a token and not the same one; `None` if there is none.

        Ids that only one of the two has (padding, an added mask token) are no difference.
        """
        for index in sorted(self._tokens.keys() & other._tokens.keys()):
            if self._tokens[index] != other._tokens[index]:
                return index
        return None


class TextStream:
    """The text of one answer, piece by piece, as its ids arrive; one stream per request.

    The pieces joined, with that of `finish`, are exactly `tokenizer.decode` of all ids. A
    character whose bytes lie in several tokens is handed out when it is complete.

    Work per piece does not grow with the answer: not all ids are decoded, only the new ones behind
    a window of six earlier ones, each of one byte at least. The window may begin inside a
    character, whose remaining bytes (three at most) are misread; it may end in an unfinished one
    (three bytes at most). Six ids keep the two apart. Worked example, ids of one byte each, "€AB€"
    so far:

        window          82 ac 41 42 e2 82    82 ac misread, but handed out long ago
        handed out      ?  ?  A  B           four characters; e2 82 waits
        next push: ac   ?  ?  A  B  €        what lies beyond four characters is the piece
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._handed_out = 0  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with `ids`; may be empty."""
        self._window += [index for index in ids if self._is_visible(index)]
        if not self._window or self._in_byte_run():
            return ""
        text = self._tokenizer.decode(self._window)
        held = int(text.endswith(REPLACEMENT))
        piece = text[self._handed_out : len(text) - held]
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._handed_out = len(self._tokenizer.decode(self._window)) - held
        return piece

    def finish(self) -> str:
        """What was held back, now that nothing follows. The stream is empty afterwards."""
        piece = self._tokenizer.decode(self._window)[self._handed_out :]
        self._window, self._handed_out = [], 0
        return piece

    def _is_visible(self, index: int) -> bool:
        known = self._tokenizer.token(index) is not None
        return known and index not in self._tokenizer.special_ids

    def _in_byte_run(self) -> bool:
        """Tokens such as <0xE2> are decoded as a run: one bad byte changes all characters of it."""
        token = self._tokenizer.token(self._window[-1]) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; published files write them as text or as an object with text."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template's own file comes first; of several named ones, the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _eos_ids(path: Path) -> list[int]:
    """`eos_token_id` of one config file, which may be absent, a number or a list."""
    value = _read_json(path).get("eos_token_id")
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
