"""`Output`: text, ids and log-probabilities end at one place, however the ids were pushed.

The tokenizer has one id for each byte, so every expected value below can be counted by hand. The
oracle of the property test decodes the whole answer with Python's own decoder after every id.
"""

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash_jax as dj
from byte_tokenizer import FIRST_SPECIAL, byte_fallback, byte_level
from dflash_jax.serving.output import Output, Piece, TokenLogprob
from dflash_jax.serving.request import DecodeStats
from dflash_jax.serving.text import REPLACEMENT, Tokenizer

BYTES = Tokenizer(byte_level(["<s>", "</s>"]))
START, END = FIRST_SPECIAL, FIRST_SPECIAL + 1
BLOCK = 8


def scored(ids: Sequence[int], first: int = 0) -> list[TokenLogprob]:
    """Log-probabilities that tell every place of an answer from every other."""
    return [TokenLogprob(token, -float(place), ()) for place, token in enumerate(ids, first)]


def blocks(ids: Sequence[int], size: int = BLOCK) -> list[list[int]]:
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]


def played(
    pushes: Sequence[Sequence[int]],
    *,
    ends: Sequence[int] = (END,),
    tokenizer: Tokenizer | None = BYTES,
    **options,
) -> tuple[Output, list[Piece]]:
    """An answer to its end, or to the last push; the pieces joined are what the output holds."""
    output = Output(tokenizer, dj.SamplingParams(logprobs=0, **options), ends)
    pieces, pushed = [], 0
    for ids in pushes:
        pieces.append(output.push(ids, scored(ids, pushed)))
        pushed += len(ids)
        if output.finish_reason is not None:
            break
    assert output.text == "".join(piece.text for piece in pieces)
    assert output.token_ids == [token for piece in pieces for token in piece.token_ids]
    assert output.logprobs == [one for piece in pieces for one in piece.logprobs or []]
    assert output.logprobs == scored(output.token_ids)
    return output, pieces


# --- End ids and limits --------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(BLOCK))
def test_an_end_id_at_every_place_of_a_block_is_the_last_that_is_handed_out(place):
    """Fault 23."""
    ids = [*b"abcdefgh"[:place], END, *b"xyz"]
    output, _ = played([ids])
    assert output.token_ids == ids[: place + 1]
    assert (output.text, output.finish_reason) == ("abcdefgh"[:place], "stop")


def test_a_stop_inside_the_limit_is_a_stop_and_one_outside_is_not():
    """Fault 24: [10, 11, STOP, 20, 21, 22] with max_tokens 5."""
    output, _ = played([[10, 11, 50, 20, 21, 22]], ends=[50], max_tokens=5)
    assert (output.token_ids, output.finish_reason) == ([10, 11, 50], "stop")
    output, _ = played([[10, 11, 12, 20, 21, 50]], ends=[50], max_tokens=5)
    assert (output.token_ids, output.finish_reason) == ([10, 11, 12, 20, 21], "length")


@pytest.mark.parametrize("limit", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_exactly_max_tokens_ids_are_handed_out(limit):
    """Fault 25."""
    output, pieces = played(blocks(b"a" * 3 * BLOCK), max_tokens=limit)
    assert (output.token_ids, output.finish_reason) == ([97] * limit, "length")
    assert output.num_generated == limit and pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("limit", [1, 3, BLOCK, 13])
def test_no_counter_passes_the_number_of_delivered_tokens(limit, stop):
    """Fault 27: ids, log-probabilities, characters and rounds of a byte each, at every push."""
    params = dj.SamplingParams(max_tokens=limit, logprobs=0, stop=stop)
    output, delivered, pushed = Output(BYTES, params, ()), [], 0
    while output.finish_reason is None:
        before, ids = output.num_generated, list(b"a" * BLOCK)
        piece = output.push(ids, scored(ids, pushed))
        pushed += BLOCK
        delivered.append(output.num_generated + output.num_cut - before)
        assert len(piece.text) == len(piece.token_ids) == len(piece.logprobs or [])
    assert len(output.token_ids) == len(output.text) == len(output.logprobs or []) == limit
    assert sum(delivered) == limit


@pytest.mark.parametrize("first", [1, 2, 106])
def test_any_of_several_end_ids_ends_the_answer(first):
    """Fault 28."""
    output, _ = played([[97, first, 1, 2, 106]], ends=[1, 2, 106])
    assert (output.token_ids, output.finish_reason) == ([97, first], "stop")


def test_an_ignored_end_id_inside_a_block_is_handed_out_with_what_follows():
    """Fault 30: the end ids of a request that ignores the model's are none."""
    ids = [97, END, *b"bcdefghijk"]
    output, _ = played([ids], max_tokens=10)
    assert (output.token_ids, output.finish_reason) == ([97, END], "stop")
    output, _ = played([ids], max_tokens=10, ends=())
    assert (output.token_ids, output.finish_reason) == (ids[:10], "length")
    assert output.text == "abcdefghi"


def test_an_end_id_among_the_first_min_tokens_ends_nothing():
    output, _ = played([[97, END, 98], [END, 99]], min_tokens=2)
    assert (output.token_ids, output.finish_reason) == ([97, END, 98, END], "stop")
    output, _ = played([[97, END, 98]], min_tokens=1)
    assert (output.token_ids, output.finish_reason) == ([97, END], "stop")


# --- Stop strings --------------------------------------------------------------------------------


def test_text_ids_and_logprobs_end_at_the_stop_string():
    """Fault 31: P = 7, so blocks of 8; the string begins in the first and ends in the second."""
    ids = BYTES.encode("a ha ha ha b")
    output, pieces = played(blocks(ids), stop=" ha ha ha")
    assert (output.text, output.token_ids) == ("a", ids[:1])
    assert output.logprobs == scored(ids[:1])
    assert output.finish_reason == "stop"
    assert [piece.token_ids for piece in pieces] == [[97], []]
    assert output.num_cut == len(ids) - 1


def test_a_token_across_the_cut_stays_and_its_text_is_cut_inside():
    hel, lo_st, op = 256, 257, 258
    words = Tokenizer(byte_fallback(["hel", "loST", "OP"]))
    output, pieces = played([[hel, lo_st], [op]], tokenizer=words, ends=(), stop="STOP")
    assert (output.text, output.token_ids) == ("hello", [hel, lo_st])
    assert [(piece.text, piece.token_ids) for piece in pieces] == [
        ("hello", [hel, lo_st]),
        ("", []),
    ]
    assert (output.finish_reason, output.num_cut) == ("stop", 1)


def test_bytes_and_specials_go_with_the_character_that_follows():
    first, second = "é".encode()
    ids = [*b"x", START, first, second, *b"ab"]
    kept, _ = played([ids], stop="ab")
    assert (kept.text, kept.token_ids) == ("xé", ids[:4])
    dropped, _ = played([ids], stop="é")
    assert (dropped.text, dropped.token_ids) == ("x", ids[:1])


def test_a_token_is_held_back_with_its_text():
    output = Output(BYTES, dj.SamplingParams(stop=["END", "Ex"]), ())
    assert output.push(list(b"thE")) == Piece("th", list(b"th"), None, None)
    assert (output.pending, output.num_generated, output.token_ids) == (1, 3, list(b"th"))
    assert output.push(list(b"N")) == Piece("", [], None, None)
    assert output.push(list(b"e")) == Piece("ENe", list(b"ENe"), None, None)
    assert output.pending == 0


@pytest.mark.parametrize("ending", ["length", "stop", "abort"])
def test_what_was_held_back_is_handed_out_when_the_answer_ends_otherwise(ending):
    limit = 4 if ending == "length" else 9
    output = Output(BYTES, dj.SamplingParams(stop="END", max_tokens=limit), (END,))
    assert output.push(list(b"aEN")) == Piece("a", [97], None, None)
    if ending == "length":
        piece = output.push([START, *b"more"])
        assert piece == Piece("EN", [*b"EN", START], None, "length")
    elif ending == "stop":
        assert output.push([END, *b"D"]) == Piece("EN", [*b"EN", END], None, "stop")
    else:
        assert output.abort() == Piece("EN", list(b"EN"), None, "abort")
    assert (output.text, output.finish_reason) == ("aEN", ending)
    assert (output.pending, output.num_cut) == (0, 0)


def test_a_stop_string_that_ends_with_the_last_token_allowed_is_a_stop():
    """Fault 24, for strings."""
    output, _ = played([list(b"abcdef")], stop="cd", max_tokens=4)
    assert (output.text, output.finish_reason) == ("ab", "stop")
    output, _ = played([list(b"abcdef")], stop="cd", max_tokens=3)
    assert (output.text, output.finish_reason) == ("abc", "length")


def test_whichever_of_stop_string_and_end_id_comes_first_ends_the_answer():
    output, _ = played([[*b"ab", END]], stop="b")
    assert (output.token_ids, output.finish_reason) == ([97], "stop")
    output, _ = played([[97, END, 98]], stop="b")
    assert (output.token_ids, output.finish_reason) == ([97, END], "stop")


def test_a_stop_string_in_what_the_text_still_owed_is_found_at_the_end():
    """A run of byte tokens shows only when something else follows, or nothing does."""
    fallback = Tokenizer(byte_fallback([]))
    ids = list("é€".encode())
    output, _ = played([ids], tokenizer=fallback, stop="€", max_tokens=len(ids))
    assert (output.text, output.finish_reason) == ("é", "stop")
    aborted = Output(fallback, dj.SamplingParams(stop="€"), ())
    aborted.push(ids)
    assert (aborted.abort().text, aborted.finish_reason) == ("é", "abort")


def test_no_stop_string_leaves_fewer_than_min_tokens_ids():
    ids = [list(b"xab"), list(b"ab"), list(b"ab")]
    cuts = {least: len(played(ids, stop="ab", min_tokens=least)[0].token_ids) for least in range(7)}
    # "ab" begins behind 1, 3 and 5 ids. With 4 asked for, the one behind 3 would leave too few.
    assert cuts == {0: 1, 1: 1, 2: 3, 3: 3, 4: 5, 5: 5, 6: 7}


def test_an_unfinished_character_among_the_first_min_tokens_is_not_taken_away():
    ids = list("éé".encode())
    output, _ = played([ids], stop="é", min_tokens=1)
    assert (output.text, output.token_ids) == ("é", ids[:2])


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("cut", range(7))
def test_pieces_never_split_a_character(cut, stop):
    """Fault 110."""
    ids = BYTES.encode("é🙂")
    output, pieces = played([ids[:cut], ids[cut:]], stop=stop)
    assert output.text == "é🙂"
    assert all(REPLACEMENT not in piece.text for piece in pieces)


def test_an_answer_that_ends_inside_a_character_shows_one_replacement_sign():
    """Fault 110."""
    output, _ = played([[*b"a", 0xF0, 0x9F]], max_tokens=3)
    assert (output.text, output.finish_reason) == ("a" + REPLACEMENT, "length")


def test_without_a_tokenizer_there_are_ids_and_no_text():
    output, pieces = played([[5, 6], [7, END, 8]], tokenizer=None)
    assert (output.token_ids, output.text) == ([5, 6, 7, END], "")
    assert [piece.token_ids for piece in pieces] == [[5, 6], [7, END]]


def test_logprobs_are_none_where_they_were_not_asked_for_and_missed_where_they_were():
    output = Output(BYTES, dj.SamplingParams(), ())
    assert output.push([97]).logprobs is None and output.logprobs is None
    with pytest.raises(ValueError, match="zip"):
        Output(BYTES, dj.SamplingParams(logprobs=0), ()).push([97])


# --- Delivered and matched -----------------------------------------------------------------------


def counted(pushes: Sequence[Sequence[int]], **options) -> tuple[Output, DecodeStats]:
    """A prefill of one token and then rounds, counted as an engine counts them."""
    output, stats = Output(BYTES, dj.SamplingParams(**options), (END,)), DecodeStats()
    for place, ids in enumerate(pushes):
        before = output.num_generated
        output.push(ids)
        if place > 0:
            stats.accepted_drafts_per_round.append(len(ids) - 1)
            stats.acceptance_lengths.append(output.num_generated + output.num_cut - before)
            stats.trim(output.num_cut)
        if output.finish_reason is not None:
            break
    return output, stats


def test_a_round_that_ends_at_its_third_token_delivers_three_and_matched_five():
    """Fault 68."""
    output, stats = counted([[97], [98, 99, END, 100, 101, 102]])
    assert (stats.acceptance_lengths, stats.num_accepted_drafts) == ([3], 5)
    assert 1 + sum(stats.acceptance_lengths) == len(output.token_ids)


def test_a_stop_string_takes_tokens_off_the_rounds_that_delivered_them():
    """Fault 68: "cdef" begins in the first of three rounds and ends in the last."""
    output, stats = counted([[97], *map(list, (b"bc", b"de", b"fgh"))], stop="cdef")
    assert output.text == "ab"
    assert stats.acceptance_lengths == [1, 0, 0]
    assert stats.num_accepted_drafts == 1 + 1 + 2
    assert 1 + sum(stats.acceptance_lengths) == len(output.token_ids)


# --- Every way of pushing the same ids -----------------------------------------------------------

TEXTS = st.text("ab é🙂", max_size=24)
STOPS = st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=3)


def visible(ids: Sequence[int]) -> bytes:
    return bytes(token for token in ids if token < FIRST_SPECIAL)


def characters(ids: Sequence[int]) -> str:
    """The complete characters of valid UTF-8, specials left out."""
    return codecs.getincrementaldecoder("utf-8")().decode(visible(ids))


def brute_force(
    ids: Sequence[int], stops: Sequence[str], least: int, most: int
) -> tuple[str, list[int], str]:
    """Text, ids and reason of an answer, from the whole text after every id."""
    starts = [len(characters(ids[:place])) for place in range(len(ids))]
    old = ""
    for count in range(1, len(ids) + 1):
        text = characters(ids[:count])
        cuts = [
            place
            for stop in stops
            for place in range(len(text))
            if text.startswith(stop, place)
            and place + len(stop) > len(old)
            and sum(start < place for start in starts[:count]) >= least
        ]
        if cuts and count > least:
            cut = min(cuts)
            kept = [ids[place] for place in range(count) if starts[place] < cut]
            return text[:cut], kept, "stop"
        whole = visible(ids[:count]).decode(errors="replace")
        if ids[count - 1] == END and count > least:
            return whole, list(ids[:count]), "stop"
        if count == most:
            return whole, list(ids[:count]), "length"
        old = text
    return visible(ids).decode(errors="replace"), list(ids), "abort"


def random_pushes(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    pushes = []
    while ids:
        size = draw(st.integers(1, 8))
        pushes.append(ids[:size])
        ids = ids[size:]
    return pushes


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Whole characters with specials among their bytes, and a way of pushing them."""
    ids = list(draw(TEXTS).encode())
    for place in draw(st.lists(st.integers(0, len(ids)), max_size=2)):
        ids.insert(place, draw(st.sampled_from([START, START, START, END])))
    return ids, random_pushes(draw, ids)


@given(answers(), STOPS, st.integers(0, 6), st.integers(6, 40))
@settings(max_examples=600, deadline=None)
def test_joined_pieces_equal_brute_force_however_the_ids_were_pushed(answer, stops, least, most):
    """Faults 23, 24, 31 and 110. An answer whose ids run out is aborted."""
    ids, pushes = answer
    output, pieces = played(pushes, stop=stops, min_tokens=least, max_tokens=most)
    if output.finish_reason is None:
        pieces.append(output.abort())
    expected = brute_force(ids, stops, least, most)
    assert (output.text, output.token_ids, output.finish_reason) == expected
    assert "".join(piece.text for piece in pieces) == output.text
    assert output.logprobs == scored(output.token_ids)
    assert all(piece.finish_reason is None for piece in pieces[:-1])


@given(
    st.lists(st.one_of(st.integers(0, END), st.sampled_from(b"ab \xc3\xa9\xf0")), max_size=40),
    st.lists(st.text("ab é" + REPLACEMENT, min_size=1, max_size=3), max_size=2),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_ids_that_are_no_text_give_the_same_answer_however_they_were_pushed(ids, stops, data):
    one_by_one, _ = played([[token] for token in ids], stop=stops)
    pushed, _ = played(random_pushes(data.draw, ids), stop=stops)
    for output in (one_by_one, pushed):
        if output.finish_reason is None:
            output.abort()
    assert pushed.text == one_by_one.text
    assert pushed.token_ids == one_by_one.token_ids
    assert pushed.finish_reason == one_by_one.finish_reason
