"""The tokenizer inside a GGUF file, as the `tokenizer.json` and `tokenizer_config.json` texts.

Only byte-level BPE is rebuilt, with the pre-tokenisers named in `PRE_TOKENIZERS`; another one is
refused, because a tokenizer that splits a little differently gives wrong ids without any error.
Nothing here encodes text: `serving/text.py` does, from the files that `gguf.py` writes.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dflash_jax.errors import CheckpointError
from dflash_jax.weights.gguf_file import GgufFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types of the GGUF format; the last two are matched as a whole, before any splitting."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2()])


PRE_TOKENIZERS = {"gpt-2": _gpt2, "smollm": _smollm}


def tokenizer_json(source: GgufFile) -> str:
    """The text of `tokenizer.json`; `CheckpointError` for a kind of tokenizer not listed here."""
    kind = source.require("tokenizer.ggml.model")
    split = source.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"the GGUF's tokenizer is {kind!r} with pre-tokeniser {split!r}; only 'gpt2' with one "
            f"of {sorted(PRE_TOKENIZERS)} is supported; use a folder that has a tokenizer.json"
        )
    tokens = source.require("tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in source.require("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_specials(
        tokenizer, tokens, source.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    )
    _add_frame(tokenizer, source, tokens)
    return tokenizer.to_str(pretty=True)


def tokenizer_config(source: GgufFile) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: special tokens by name and the chat template."""
    tokens = source.require("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "add_bos_token": source.get("tokenizer.ggml.add_bos_token", False),
        "add_eos_token": source.get("tokenizer.ggml.add_eos_token", False),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = source.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    template = source.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _add_specials(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (hidden when decoding); user-defined ones are only unsplit."""
    for token, kind in zip(tokens, types, strict=True):
        if kind not in (CONTROL, USER_DEFINED):
            continue
        added = AddedToken(token, normalized=False, special=kind == CONTROL)
        if kind == CONTROL:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])


def _add_frame(tokenizer: Tokenizer, source: GgufFile, tokens: list[str]) -> None:
    """A start or end token around each text, only where the file asks for one."""
    frame, specials = ["$A"], []
    if source.get("tokenizer.ggml.add_bos_token", False):
        bos = source.require("tokenizer.ggml.bos_token_id")
        frame.insert(0, tokens[bos])
        specials.append((tokens[bos], bos))
    if source.get("tokenizer.ggml.add_eos_token", False):
        eos = source.require("tokenizer.ggml.eos_token_id")
        frame.append(tokens[eos])
        specials.append((tokens[eos], eos))
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, special_tokens=specials
        )


def _pair(merge: str) -> tuple[str, str]:
    first, second = merge.split(" ", 1)
    return first, second
