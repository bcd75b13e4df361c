"""TextStream: joined pieces are the full decode, characters come whole, work stays linear."""

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizer import FIRST_SPECIAL, byte_fallback, byte_level
from dflash_jax.serving.text import REPLACEMENT, TextStream, Tokenizer

BYTES = Tokenizer(byte_level(["<s>", "</s>"]))


def streamed(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


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


def test_an_id_without_a_token_neither_shows_nor_breaks_a_character():
    first, *rest = "é".encode()
    assert streamed(BYTES, [[97], [first], [5000], rest]) == ["a", "", "", "é", ""]


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
