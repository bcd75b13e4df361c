"""The demo target's tokenizer: pinned ids, pinned chat layout, every text comes back.

The ids in `data/smollm2_token_ids.json` were produced by llama.cpp (its `/tokenize` endpoint, 2026)
from the GGUF file itself, so neither this project nor the `tokenizers` package chose them.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.serving.text import TextStream, Tokenizer

PINNED = json.loads((Path(__file__).parent / "data" / "smollm2_token_ids.json").read_text())


@pytest.fixture(scope="module")
def smollm2(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_folder)


def test_at_least_twenty_strings_are_pinned():
    assert len(PINNED) >= 20


@pytest.mark.parametrize("pinned", PINNED, ids=[repr(pinned["text"])[:24] for pinned in PINNED])
def test_the_demo_tokenizer_gives_the_pinned_ids_and_the_text_back(smollm2, pinned):
    assert smollm2.encode(pinned["text"]) == pinned["ids"]
    assert smollm2.decode(pinned["ids"], skip_special_tokens=False) == pinned["text"]


def test_the_demo_tokenizer_splits_every_digit(smollm2):
    digits = smollm2.encode("90210")
    assert [smollm2.decode([index]) for index in digits] == list("90210")


def test_the_demo_chat_is_laid_out_as_the_model_was_trained(smollm2):
    """The expected text is what llama.cpp's `/apply-template` gives for these messages."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo 1"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo 1<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.chat_ids(messages)
    assert smollm2.decode(ids, skip_special_tokens=False) == expected
    assert ids == smollm2.encode(expected)
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.vocab_size == 49152


UNSPELLED = "\x04\x06\x13\x14\x16\x1d"
"""Characters that the demo model's vocabulary cannot spell: it has no token for their byte. The
same holds for the bytes F1 and F2, which begin U+40000 … U+BFFFF, where Unicode has nothing."""

SPELLED = st.one_of(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=UNSPELLED),
    st.characters(min_codepoint=0xC0000),
)


def test_a_character_that_the_demo_vocabulary_cannot_spell_loses_the_bytes_without_a_token(smollm2):
    """Pinned as llama.cpp does it."""
    assert smollm2.encode("a\U00040000b") == [81, 218, 218, 218, 82]
    assert [smollm2.encode(character) for character in UNSPELLED] == [[]] * len(UNSPELLED)


def test_random_unicode_comes_back_byte_for_byte(smollm2):
    @given(st.text(SPELLED, max_size=60), st.integers(1, 3))
    @settings(max_examples=300, deadline=None)
    def check(text: str, size: int) -> None:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        stream = TextStream(smollm2)
        streamed = "".join(stream.push(piece) for piece in pieces) + stream.finish()
        assert streamed == smollm2.decode(ids)

    check()
