"""Tokenizer and TextStream: on byte tokenizers where every id is known, and on the demo target's.

The ids in `data/smollm2_token_ids.json` were produced by llama.cpp (its `/tokenize` endpoint, 2026)
from the GGUF file itself, so neither this project nor the `tokenizers` package chose them.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from byte_tokenizer import FIRST_SPECIAL, byte_fallback, byte_level, byte_symbols, write_folder
from dflash_jax.errors import CheckpointError, RequestError
from dflash_jax.serving.text import REPLACEMENT, TextStream, Tokenizer

PINNED = json.loads((Path(__file__).parent / "data" / "smollm2_token_ids.json").read_text())
SPECIALS = ["<s>", "</s>"]
BYTES = Tokenizer(byte_level(SPECIALS))
CHAT = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def smollm2(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_folder)


def streamed(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


# --- Encoding and decoding ---------------------------------------------------------------------


def test_the_tokens_of_the_byte_tokenizer_are_the_bytes_of_the_text():
    assert BYTES.encode("é🙂 a") == list("é🙂 a".encode())
    assert BYTES.decode(list("é🙂 a".encode())) == "é🙂 a"
    assert BYTES.vocab_size == FIRST_SPECIAL + len(SPECIALS)


def test_specials_in_a_text_are_parsed_and_hidden_when_decoding():
    ids = BYTES.encode("a<s>b</s>")
    assert ids == [97, 256, 98, 257]
    assert BYTES.decode(ids) == "ab"
    assert BYTES.decode(ids, skip_special_tokens=False) == "a<s>b</s>"


def test_ids_without_a_token_decode_to_nothing():
    assert BYTES.decode([97, 5000, 98]) == "ab"
    assert "".join(streamed(BYTES, [[97], [5000], [98]])) == "ab"


def test_a_lone_surrogate_is_refused_as_a_request():
    with pytest.raises(RequestError, match="valid Unicode"):
        BYTES.encode("a\ud800")


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, raw))
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == list(b"a")


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no tokenizer.json; add the one of the model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match="tokenizer.json is not a valid tokenizer file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content, message", [("{", "is not valid JSON"), ("[]", "not list")])
def test_a_broken_config_beside_the_tokenizer_is_named(tmp_path, content, message):
    write_folder(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"generation_config.json .*{message}"):
        Tokenizer.from_folder(tmp_path)


# --- End ids -----------------------------------------------------------------------------------


def test_the_end_ids_of_all_three_sources_are_united(tmp_path):
    """Fault 28."""
    folder = write_folder(
        tmp_path,
        byte_level(SPECIALS),
        config={"eos_token_id": 1},
        generation_config={"eos_token_id": [1, 106]},
        tokenizer_config={"eos_token": {"content": "</s>", "special": True}},
    )
    assert Tokenizer.from_folder(folder).eos_token_ids == (1, 106, 257)


@pytest.mark.parametrize("config", [{}, {"eos_token_id": None}])
def test_a_model_without_end_ids_has_none(tmp_path, config):
    folder = write_folder(tmp_path, byte_level(), config=config)
    assert Tokenizer.from_folder(folder).eos_token_ids == ()


def test_the_end_ids_are_shown_when_the_tokenizer_is_read(tmp_path, caplog):
    """Fault 28."""
    folder = write_folder(tmp_path, byte_level(), config={"eos_token_id": [7, 9]})
    with caplog.at_level("INFO", logger="dflash_jax.serving.text"):
        Tokenizer.from_folder(folder)
    assert "end with any of the ids (7, 9)" in caplog.text


# --- Chat --------------------------------------------------------------------------------------


def test_chat_and_raw_text_begin_with_exactly_one_start_token():
    """Fault 111."""
    raw = byte_level(SPECIALS, bos="<s>")
    tokenizer = Tokenizer(raw, special_tokens={"bos_token": "<s>"}, chat_template=CHAT)
    chat = tokenizer.chat_ids([{"role": "u", "content": "hi"}])
    assert chat == [256, *b"u:hi\n"]
    assert tokenizer.encode("hi") == [256, *b"hi"]
    assert tokenizer.encode("hi", add_special_tokens=False) == list(b"hi")


def test_chat_text_and_raw_text_give_the_same_ids():
    """Fault 112."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer(byte_level(SPECIALS, bos="<s>"), chat_template=template)
    text = "<s>é </s>🙂"
    chat = tokenizer.chat_ids([{"role": "user", "content": text}])
    assert chat == tokenizer.encode(text, add_special_tokens=False)
    assert chat == [256, *"é ".encode(), 257, *"🙂".encode()]


def test_the_template_follows_the_rules_that_templates_are_written_for():
    template = (
        "{% for m in messages %}\n"
        "    {% if m['role'] == 'skip' %}{% continue %}{% endif %}\n"
        "    {{- m | tojson }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ thinking }}"
        "{% if add_generation_prompt %}>{% endif %}{{ tools is none }}"
    )
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    messages = [{"role": "skip"}, {"role": "user", "content": "<é&'>"}]
    ids = tokenizer.chat_ids(messages, thinking="no")
    assert tokenizer.decode(ids) == '{"role": "user", "content": "<é&\'>"}\n4no>True'
    ids = tokenizer.chat_ids(messages, add_generation_prompt=False, thinking="no")
    assert tokenizer.decode(ids).endswith("4noTrue")


def test_a_model_without_a_template_refuses_chat_and_says_what_to_do():
    assert not BYTES.has_chat_template
    with pytest.raises(RequestError, match=r"has no chat template .* use generate\(\)"):
        BYTES.chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + '!' }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "cannot render these messages"),
        ("{{ messages.append(1) }}", "cannot render these messages"),
        ("{% for %}", "is not valid jinja"),
    ],
)
def test_what_a_template_cannot_or_may_not_do_is_a_refused_request(template, message):
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    with pytest.raises(RequestError, match=message):
        tokenizer.chat_ids([{"role": "user", "content": None}])


def test_the_template_is_read_from_its_own_file_before_the_config(tmp_path):
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "config"})
    assert Tokenizer.from_folder(folder).chat_ids([]) == list(b"config")
    (folder / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_folder(folder).chat_ids([]) == list(b"own file")


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_ids([]) == list(b"plain")


# --- Two vocabularies --------------------------------------------------------------------------


def swapped(first: int, second: int) -> Tokenizer:
    content = json.loads(byte_level(SPECIALS).to_str())
    vocabulary, symbols = content["model"]["vocab"], byte_symbols()
    vocabulary[symbols[first]], vocabulary[symbols[second]] = second, first
    return Tokenizer(RawTokenizer.from_str(json.dumps(content)))


def test_swapped_ids_are_found_and_the_first_is_named():
    """Fault 94."""
    assert BYTES.same_ids(swapped(5, 6)) == 5
    assert swapped(200, 17).same_ids(BYTES) == 17


def test_vocabularies_that_differ_in_padding_only_are_the_same():
    """Fault 94."""
    padded = Tokenizer(byte_level([*SPECIALS, "<pad0>", "<pad1>", "<mask>"]))
    assert padded.vocab_size == BYTES.vocab_size + 3
    assert BYTES.same_ids(padded) is None
    assert padded.same_ids(BYTES) is None
    assert BYTES.same_ids(BYTES) is None


# --- The text of a growing answer --------------------------------------------------------------


def test_bytes_decoded_one_by_one_would_be_six_replacement_signs():
    """Fault 110: what a decoder without state shows, so that the next tests mean something."""
    ids = BYTES.encode("é🙂")
    assert "".join(BYTES.decode([index]) for index in ids) == REPLACEMENT * 6


@pytest.mark.parametrize("cut", range(7))
def test_a_character_split_over_two_pushes_comes_whole(cut):
    """Fault 110."""
    ids = BYTES.encode("é🙂")
    pieces = streamed(BYTES, [ids[:cut], ids[cut:]])
    assert "".join(pieces) == "é🙂"
    assert REPLACEMENT not in "".join(pieces)


def test_a_character_is_handed_out_by_the_push_that_completes_it():
    """Fault 110."""
    pieces = streamed(BYTES, [[index] for index in BYTES.encode("aé🙂b")])
    assert pieces == ["a", "", "é", "", "", "", "🙂", "b", ""]


def test_a_lone_first_byte_at_the_very_end_is_flushed_as_one_replacement_sign():
    """Fault 110."""
    ids = [*BYTES.encode("aé"), 0xF0]
    pieces = streamed(BYTES, [[index] for index in ids])
    assert pieces[-1] == REPLACEMENT
    assert "".join(pieces) == BYTES.decode(ids) == "aé" + REPLACEMENT


def test_two_streams_do_not_share_state():
    """Fault 110."""
    first, second = TextStream(BYTES), TextStream(BYTES)
    left, right = list("é".encode()), list("ß".encode())
    assert first.push(left[:1]) + second.push(right[:1]) == ""
    assert (first.push(left[1:]), second.push(right[1:])) == ("é", "ß")


def test_a_special_inside_a_character_neither_shows_nor_breaks_it():
    ids = list("🙂".encode())
    pieces = streamed(BYTES, [ids[:2], [257], ids[2:], [257]])
    assert pieces == ["", "", "🙂", "", ""]


def test_a_finished_stream_is_empty():
    stream = TextStream(BYTES)
    stream.push([97, 0xC3])
    assert stream.finish() == REPLACEMENT
    assert stream.finish() == ""


@given(
    st.lists(
        st.one_of(
            st.integers(0, 257),
            st.integers(0x80, 0xBF),
            st.sampled_from([0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]),
        ),
        max_size=40,
    ),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
@settings(max_examples=400, deadline=None)
def test_joined_pieces_are_the_full_decode_whatever_the_bytes_and_the_cuts(ids, sizes):
    """Fault 110. Bytes that are no text at all included; the oracle is Python's own decoder."""
    pieces, rest = [], ids
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    joined = "".join(streamed(BYTES, pieces))
    visible = bytes(index for index in ids if index < FIRST_SPECIAL)
    assert joined == BYTES.decode(ids) == codecs.decode(visible, "utf-8", errors="replace")


WORDS = ["▁", "▁Hello", "lo", "▁▁", "x"]
FALLBACK = Tokenizer(byte_fallback(WORDS))


@given(
    st.lists(st.one_of(st.integers(256, 256 + len(WORDS) - 1), st.integers(0, 255)), max_size=24),
    st.integers(1, 4),
)
@settings(max_examples=400, deadline=None)
def test_joined_pieces_are_the_full_decode_of_a_byte_fallback_tokenizer(ids, size):
    """Fault 110. Its decoder strips the first space and replaces whole runs of bytes."""
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert "".join(streamed(FALLBACK, pieces)) == FALLBACK.decode(ids)


def test_a_byte_fallback_tokenizer_keeps_inner_spaces_and_joins_its_bytes():
    hello, x = 257, 260
    pieces = streamed(FALLBACK, [[hello], [hello], *([byte] for byte in "€".encode()), [x]])
    assert pieces == ["Hello", " Hello", "", "", "", "€x", ""]


class Counting(Tokenizer):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("text", [b"plain ascii text ", "日本語🙂".encode(), b"\x80", b"\xf0"])
def test_the_work_of_a_stream_grows_with_the_new_ids_only(text):
    tokenizer = Counting(byte_level())
    ids = list(text * (2000 // len(text)))
    pieces = streamed(tokenizer, [[index] for index in ids])
    assert tokenizer.decoded <= 13 * len(ids) + 6
    assert "".join(pieces) == tokenizer.decode(ids)


# --- The demo target's tokenizer ---------------------------------------------------------------


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
        assert "".join(streamed(smollm2, pieces)) == smollm2.decode(ids)

    check()
