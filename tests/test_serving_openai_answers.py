"""OpenAI-compatible answers as values: shapes, usage, log-probabilities, figures."""

import json
import math
from pathlib import Path

import pytest

from byte_tokenizer import byte_fallback, byte_level, write_folder
from dflash_jax.serving.openai_answers import Answer, event, figures, usage
from dflash_jax.serving.output import Piece
from dflash_jax.serving.request import Completion, DecodeStats, TokenLogprob
from dflash_jax.serving.text import Tokenizer
from dflash_jax.serving.token_texts import TokenTexts

EURO = list("€".encode())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TokenTexts:
    folder = write_folder(tmp_path_factory.mktemp("bytes"), byte_level(["<|end|>"]))
    return TokenTexts(Tokenizer.from_folder(folder))


def answer(kind: str, texts: TokenTexts | None, choices: int = 1) -> Answer:
    return Answer(kind, "r1", "m", 5, choices=choices, token_texts=texts)  # type: ignore[arg-type]


def scored(ids: list[int], top: int = 0) -> list[TokenLogprob]:
    others = ((ord("z"), -0.25), (-1, -math.inf))
    return [TokenLogprob(i, -0.5, others[:top]) for i in ids]


def completion(text: str, ids: list[int], **fields: object) -> Completion:
    one = Completion(text, ids, "stop", [1, 2, 3], **fields)  # type: ignore[arg-type]
    one.choices.append(one)
    return one


def test_a_whole_chat_answer(texts: TokenTexts):
    document = answer("chat", texts).whole([completion("ab", [97, 98])], {"request_id": "r1"})
    assert document == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "dflash": {"request_id": "r1"},
    }


def test_choices_are_numbered_over_all_prompts_and_usage_counts_each_delivered_token():
    first, second = completion("a", [97]), completion("b", [98])
    first.choices.append(completion("cc", [99, 99]))
    first.stats.reused_prompt_tokens = 2
    document = answer("completion", None, 3).whole([first, second], {})
    choices = [(one["index"], one["text"]) for one in document["choices"]]
    assert choices == [(0, "a"), (1, "cc"), (2, "b")]
    assert document["object"] == "text_completion" and document["id"] == "cmpl-r1"
    assert document["usage"] == usage([first, second])
    counts = document["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (6, 4)
    assert counts["prompt_tokens_details"] == {"cached_tokens": 2}


def test_chunks_of_a_chat_name_the_role_once_for_each_choice(texts: TokenTexts):
    growing = answer("chat", texts, 2)
    deltas = [
        growing.chunk(index, Piece(text, [97], None, None), {})["choices"][0]["delta"]
        for index, text in ((0, "a"), (1, "b"), (0, "c"))
    ]
    assert deltas == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"content": "c"},
    ]
    last = growing.chunk(0, Piece("", [], None, "length"), {"accepted": [2]})
    assert last["object"] == "chat.completion.chunk"
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["dflash"] == {"accepted": [2]}
    counted = growing.last([completion("ac", [97, 99])])
    assert counted["choices"] == [] and counted["usage"]["completion_tokens"] == 2


def test_chat_logprobs_have_text_and_bytes_and_no_infinity(texts: TokenTexts):
    piece = Piece("a", [97], [TokenLogprob(97, -math.inf, ((122, -0.25), (-1, -math.inf)))], None)
    choice = answer("chat", texts).chunk(0, piece, {})["choices"][0]
    assert choice["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -9999.0,
            "bytes": [97],
            "top_logprobs": [{"token": "z", "logprob": -0.25, "bytes": [122]}],
        }
    ]
    json.loads(json.dumps(choice), parse_constant=lambda name: pytest.fail(name))


def test_completion_logprobs_are_lists_beside_each_other_with_offsets_into_the_text(
    texts: TokenTexts,
):
    ids = [97, *EURO, 98]
    parts = [ids[:2], ids[2:]]  # a character across two chunks
    growing = answer("completion", texts)
    chunks = [growing.chunk(0, Piece("", part, scored(part, 2), None), {}) for part in parts]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    whole = answer("completion", texts).whole(
        [completion("a€b", ids, logprobs=scored(ids, 2))], {}
    )["choices"][0]["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert found[0][name] + found[1][name] == whole[name]
        assert len(whole[name]) == len(ids)
    assert whole["text_offset"] == [0, 1, 1, 1, 2]
    assert whole["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert whole["top_logprobs"][0] == {"z": -0.25, "a": -0.5}


def test_logprobs_that_were_not_asked_for_are_null(texts: TokenTexts):
    for kind in ("chat", "completion"):
        chunk = answer(kind, texts).chunk(0, Piece("a", [97], None, None), {})
        assert chunk["choices"][0]["logprobs"] is None


def test_without_a_tokenizer_a_token_reads_as_its_id():
    chunk = answer("completion", None).chunk(0, Piece("", [97], scored([97]), None), {})
    logprobs = chunk["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["97"], [0])


def test_tokens_of_words_keep_their_space_and_byte_tokens_their_bytes(tmp_path: Path):
    words = ["▁", "a", "▁big", "dog"]
    raw = byte_fallback(words)
    texts = TokenTexts(Tokenizer.from_folder(write_folder(tmp_path / "words", raw)))
    assert [texts.text(256 + place) for place in (2, 3)] == [" big", "dog"]
    assert (texts.text(0xE2), texts.bytes(0xE2)) == ("bytes:\\xe2", [0xE2])
    assert texts.bytes(258) == list(b" big")


def test_a_special_token_reads_as_it_is_written(texts: TokenTexts):
    assert texts.text(256) == "<|end|>"


def test_the_figures_say_how_a_request_was_decoded():
    """Fault 93."""
    first = completion("a", [97])
    first.stats = DecodeStats([3, 1], [3, 3], [2, 0], speculation="dflash", notes=["narrowed"])
    second = completion("b", [98])
    second.stats = DecodeStats([4], [3], [3], speculation="dflash", stopped_drafting_at=40)
    first.choices.append(second)
    said = figures("r1", [first], max_draft_len=3, seed=9)
    assert said["acceptance_length"] == pytest.approx(8 / 3)
    assert (said["num_rounds"], said["num_drafts"], said["num_accepted_drafts"]) == (3, 9, 5)
    assert (said["speculation"], said["max_draft_len"], said["seed"]) == ("dflash", 3, 9)
    assert (said["stopped_drafting_at"], said["notes"]) == (40, ["narrowed"])
    plain = completion("a", [97])
    said = figures("r1", [plain], max_draft_len=3, seed=9)
    assert (said["speculation"], said["max_draft_len"]) == ("none", 0)
    assert said["acceptance_length"] is None


def test_an_event_is_one_line_of_json():
    assert event({"text": "a\n\nb"}) == b'data: {"text": "a\\n\\nb"}\n\n'
    assert event("[DONE]") == b"data: [DONE]\n\n"
