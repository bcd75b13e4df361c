"""What a running engine refuses, request by request, without harm to anything beside it.

What is refused before it starts is in test_llm_start.py, calls that end early are in
test_llm_interrupted.py.
"""

import numpy as np
import pytest

import dflash_jax as dj
import tiny_served
from tiny_served import FIRST, PARAMS, SECOND, SERVED, THIRD
from tiny_text import VOCAB


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> dj.LLM:
    return tiny_served.start(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def solo(llm) -> dict[tuple[int, ...], list[int]]:
    return tiny_served.alone(llm)


@pytest.mark.parametrize(
    "prompt",
    [[], [-1], [VOCAB], [5, 10**9], [True], [1.0], ["5"], [None], [np.float32(2.5)], [[1]]],
    ids=repr,
)
@pytest.mark.usefixtures("as_a_user")
def test_a_prompt_that_is_empty_or_not_ids_is_refused(llm, prompt):
    with pytest.raises(dj.RequestError) as refused:
        llm.generate([prompt], PARAMS)
    message = str(refused.value)
    if prompt:
        assert repr(prompt[-1]) in message and f"0 to {VOCAB - 1}" in message
    else:
        assert "empty" in message


def test_an_empty_text_is_refused(llm):
    with pytest.raises(dj.RequestError, match="empty"):
        llm.generate("", PARAMS)


@pytest.mark.usefixtures("as_a_user")
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(llm):
    answers = llm.generate([FIRST, 5], PARAMS)  # type: ignore[list-item]
    assert answers[1].finish_reason == "abort" and "neither text" in (answers[1].error or "")


@pytest.mark.usefixtures("as_a_user")
def test_whole_numbers_of_numpy_are_ids(llm, solo):
    for prompt in (np.asarray(FIRST, np.int64), [np.int32(token) for token in FIRST]):
        assert llm.generate([prompt], PARAMS)[0].token_ids == solo[tuple(FIRST)]  # type: ignore[list-item]


def test_no_prompts_give_no_answers(llm):
    assert llm.generate([], PARAMS) == []


@pytest.mark.parametrize(
    "length, max_tokens, total, remedy",
    [(1, 64, 65, "max_tokens <= 63"), (60, 5, 65, "max_tokens <= 4"),
     (63, 2, 65, "max_tokens <= 1"), (64, 1, 65, "shorter prompt"), (65, 1, 66, "shorter prompt")],
)  # fmt: skip
def test_a_request_beyond_the_served_length_is_refused_with_its_numbers(
    llm, length, max_tokens, total, remedy
):
    """Fault 38."""
    with pytest.raises(dj.RequestError) as refused:
        llm.generate([[3] * length], dj.SamplingParams(max_tokens=max_tokens))
    message = str(refused.value)
    assert f"{length} prompt tokens" in message and f"max_tokens={max_tokens}" in message
    assert f"= {total}" in message and f"served length of {SERVED}" in message
    assert remedy in message and f"max_seq_len >= {total}" in message


@pytest.mark.parametrize("length", [1, 32, 62, 63])
def test_a_request_that_fills_the_served_length_is_served_exactly(llm, length):
    """Fault 38, the other side."""
    room = SERVED - length
    answer = llm.generate([[3] * length], dj.SamplingParams(max_tokens=room, ignore_eos=True))[0]
    assert len(answer.token_ids) == room and answer.finish_reason == "length"


@pytest.mark.parametrize(
    "params, named",
    [
        (dj.SamplingParams(max_tokens=0), "max_tokens=0"),
        (dj.SamplingParams(temperature=-0.1), "temperature=-0.1"),
        (dj.SamplingParams(temperature=float("nan")), "temperature=nan"),
        (dj.SamplingParams(seed=-1), "seed=-1"),
        (dj.SamplingParams(top_p=1.5), "top_p=1.5"),
        (dj.SamplingParams(stop_token_ids=range(100, 140)), "end ids"),
        (dj.SamplingParams(n=0), "n=0"),
        (dj.SamplingParams(logit_bias={10**6: 1.0}), "token id 1000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(llm, params, named):
    with pytest.raises(dj.RequestError) as refused:
        llm.generate([FIRST], params)
    assert named in str(refused.value)


def test_another_number_of_parameters_than_of_prompts_is_refused(llm):
    with pytest.raises(dj.RequestError, match="3 prompts came with 2 SamplingParams"):
        llm.generate([FIRST, SECOND, THIRD], [PARAMS, PARAMS])


def test_within_a_batch_only_the_bad_requests_are_refused(llm, solo, caplog):
    prompts = [FIRST, [VOCAB], SECOND, [], THIRD]
    answers = llm.generate(prompts, PARAMS)
    assert [answer.finish_reason for answer in answers] == [
        "length", "abort", "length", "abort", "length",
    ]  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.finish_reason == "length":
            assert answer.token_ids == solo[tuple(prompt)] and answer.error is None
    assert str(VOCAB) in (answers[1].error or "") and "empty" in (answers[3].error or "")
    assert len(caplog.records) == 2
    assert answers[1].choices == [answers[1]]


def test_a_refused_stream_is_refused_when_it_is_asked_for(llm):
    with pytest.raises(dj.RequestError, match="empty"):
        llm.stream([], PARAMS)


def test_text_without_a_tokenizer_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    for ask in (llm.generate, llm.stream):
        with pytest.raises(dj.RequestError, match="tokenizer.json"):
            ask("text", PARAMS)
    with pytest.raises(dj.RequestError, match="tokenizer.json"):
        llm.chat([{"role": "user", "content": "text"}], PARAMS)
    assert llm.generate([FIRST], PARAMS)[0].text == ""
