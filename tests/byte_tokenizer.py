"""Tokenizers small enough to reason about: one id per byte, in the two styles of published models.

`byte_level` is the style of Llama 3 and Qwen: ids 0–255 are the bytes, specials follow.
`byte_fallback` is the style of Llama 2: words with a leading ▁, unknown characters as <0xE2> …
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

FIRST_SPECIAL = 256


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte, byte 0 first: printable bytes stand for themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256)]


def byte_level(specials: Sequence[str] = (), *, bos: str | None = None) -> Tokenizer:
    """Id = byte; the specials have ids 256, 257, …; `bos` is put before every text."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, normalized=False) for special in specials])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def byte_fallback(words: Sequence[str]) -> Tokenizer:
    """Ids 0–255 are the tokens <0x00> … <0xFF>, the words follow."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + list(words)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
    """Save tokenizer.json, and each keyword `name` as `name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
