"""What one token reads as, for log-probabilities: its text within a sentence, and its bytes.

The text of an answer is not made of these (`output.py` decodes whole runs): a token may be a piece
of a character.
"""

import re

from dflash_jax.serving.text import REPLACEMENT, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write byte b as a printable character: Latin-1's where that is one,
    the rest from U+0100 on in ascending order (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


class TokenTexts:
    """Texts of single tokens of one vocabulary, remembered."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        # Some decoders drop the space before a sentence's first token: none is decoded as first.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decoded([]))
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text(self, index: int) -> str:
        """The token's text; of a piece of a character its bytes, written as `bytes:\\xe2`."""
        return self._entry(index)[0]

    def bytes(self, index: int) -> list[int] | None:
        """The token's bytes; None where the vocabulary does not tell them."""
        return self._entry(index)[1]

    def _entry(self, index: int) -> tuple[str, list[int] | None]:
        if index not in self._known:
            self._known[index] = self._read(index)
        return self._known[index]

    def _read(self, index: int) -> tuple[str, list[int] | None]:
        text = self._decoded([index])[self._skipped :]
        if REPLACEMENT not in text:
            return text, list(text.encode("utf-8"))
        token = self.tokenizer.token(index) or ""
        if match := _BYTE_TOKEN.fullmatch(token):
            found = [int(match[1], 16)]
        elif token and all(character in BYTES for character in token):
            found = [BYTES[character] for character in token]
        else:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode([*self._anchor, *ids], skip_special_tokens=False)
