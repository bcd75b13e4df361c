"""Requests of the OpenAI-compatible endpoints as values: every field acts or is refused by name."""

import json
from typing import Any

import pytest

from dflash_jax.serving import openai_fields as fields
from dflash_jax.serving.openai_api import ApiError, read_chat, read_completion, read_json
from dflash_jax.serving.request import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
SERVED = 100


def chat(**body: Any) -> SamplingParams:
    return read_chat({"messages": HELLO, **body}).params(10, SERVED)


def completion(**body: Any) -> SamplingParams:
    return read_completion({"prompt": "hello", **body}).params(10, SERVED)


def refusal(read: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert caught.value.status == 400
    return caught.value


# A value that is not the default, and what it has to become.
ACTING = {
    "temperature": (0.5, 0.5),
    "top_p": (0.9, 0.9),
    "n": (3, 3),
    "stop": ("\n", ("\n",)),
    "seed": (11, 11),
    "presence_penalty": (1, 1.0),
    "frequency_penalty": (-1.5, -1.5),
    "logit_bias": ({"42": -100}, {42: -100.0}),
    "top_k": (5, 5),
    "min_p": (0.1, 0.1),
    "min_tokens": (2, 2),
    "repetition_penalty": (1.1, 1.1),
    "ignore_eos": (True, True),
    "stop_token_ids": ([3, 4], (3, 4)),
    "speculate": (False, False),
}


@pytest.mark.parametrize("read", [chat, completion], ids=["chat", "completion"])
@pytest.mark.parametrize("name", ACTING)
def test_each_sampling_field_reaches_the_params_and_nothing_else_changes(name: str, read: Any):
    """Fault 17."""
    given, expected = ACTING[name]
    assert getattr(SamplingParams(), name) != expected  # or the test could not fail
    changed, plain = vars(read(**{name: given})), vars(read())
    assert changed[name] == expected
    assert {key for key in plain if plain[key] != changed[key]} == {name}


def test_no_field_is_accepted_that_these_tests_do_not_know():
    """Fault 17: a new field needs its line in ACTING or a test of its own."""
    assert set(fields.SAMPLING) == set(ACTING)
    own = {"model", "stream", "stream_options", "max_tokens", "logprobs"}
    assert set(fields.COMPLETION["properties"]) == {"prompt", *own, *ACTING}
    chat_only = {"messages", "max_completion_tokens", "top_logprobs"}
    assert set(fields.CHAT["properties"]) == {*chat_only, *own, *ACTING}
    reachable = {*ACTING, "max_tokens", "logprobs"}
    assert reachable == set(SamplingParams.__dataclass_fields__)


def test_the_defaults_are_openais_where_they_differ_from_ours():
    assert (chat().temperature, completion().temperature) == (1.0, 1.0)
    assert chat().max_tokens == SERVED - 10
    assert completion().max_tokens == 16
    assert (chat().logprobs, completion().logprobs, chat().seed) == (None, None, None)


def test_null_is_the_same_as_leaving_a_field_out():
    for read, schema in ((chat, fields.CHAT), (completion, fields.COMPLETION)):
        names = set(schema["properties"]) - {"messages", "prompt"}
        nothing = dict.fromkeys([*names, *fields.REFUSED])
        assert read(**nothing) == read()


def test_both_names_of_the_limit_are_one_limit():
    assert chat(max_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).max_tokens == 7
    assert "are the same limit" in str(refusal(chat, max_completion_tokens=7, max_tokens=8))


def test_logprobs_in_both_dialects():
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=False).logprobs is None
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=5).logprobs == 5
    assert refusal(chat, top_logprobs=4).param == "top_logprobs"
    assert refusal(chat, logprobs=3).param == "logprobs"
    assert refusal(completion, logprobs=True).param == "logprobs"


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([1.0, 2], [[1, 2]]),
        ("", [""]),
    ],
)
def test_a_prompt_is_text_or_ids_one_or_many(prompt: Any, prompts: list[Any]):
    assert read_completion({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [5, [], [[]], ["a", 1], [1, "a"], [True], [-1], [1.5], {}, [[[1]]]]
)
def test_any_other_prompt_is_refused(prompt: Any):
    error = refusal(completion, prompt=prompt)
    assert (error.param or "").startswith("prompt")


def test_messages_are_texts_and_lists_of_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None},
    ]
    assert read_chat({"messages": given}).prompts == [
        [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": ""},
        ]
    ]


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": []}], "messages[0].content"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(messages: Any, param: str):
    assert refusal(chat, messages=messages).param == param


@pytest.mark.parametrize("read", [chat, completion], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("grammar", "root ::= [0-9]+"),
        ("guided_regex", "[0-9]+"),
        ("guided_json", {}),
        ("structured_outputs", {"regex": "[0-9]+"}),
    ],
)
def test_a_grammar_is_refused_with_the_reason(name: str, value: Any, read: Any):
    """Fault 118."""
    error = refusal(read, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert "every draft would have to be checked against it" in str(error)


@pytest.mark.parametrize("read", [chat, completion], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("user", "me"),
        ("no_such_field", 0),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any, read: Any):
    error = refusal(read, **{name: value})
    assert error.param == name and str(error).startswith(name)


def test_values_of_unsupported_fields_that_ask_for_nothing_are_allowed():
    nothing = {name: harmless[0] for name, (harmless, _) in fields.REFUSED.items() if harmless}
    assert completion(**nothing) == completion()
    assert chat(**nothing) == chat()


@pytest.mark.parametrize(
    "name, value, needed",
    [
        ("temperature", -1, "a number >= 0 and < 10000"),
        ("temperature", "1", "a number >= 0"),
        ("temperature", True, "a number >= 0"),
        ("temperature", 10**400, "a number >= 0"),
        ("top_p", 0, "a number > 0 and <= 1"),
        ("n", 0, "a whole number >= 1 and <= 128"),
        ("n", 1.5, "a whole number"),
        ("seed", -1, "a whole number >= 0 and <= 4294967295"),
        ("stop", [""], "a string that is not empty"),
        ("stop", ["x"] * 17, "a list of 0 to 16 strings"),
        ("logit_bias", {"a": 1}, "names such as"),
        ("logit_bias", {"1": 101}, "a number >= -100 and <= 100"),
        ("logit_bias", {str(i): 1 for i in range(301)}, "at most 300 entries"),
        ("logit_bias", [], "an object"),
        ("top_k", -2, "a whole number >= -1"),
        ("max_tokens", 0, "a whole number >= 1"),
        ("stream", "yes", "true or false"),
        ("model", 5, "a string"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_needed(name: str, value: Any, needed: str):
    for read in (chat, completion):
        error = refusal(read, **{name: value})
        assert (error.param or "").startswith(name)
        assert needed in str(error) and len(str(error)) < 400


def test_options_that_contradict_each_other_are_refused():
    error = refusal(completion, min_tokens=17)
    assert error.param == "min_tokens" and "max_tokens=16" in str(error)
    assert refusal(chat, stream_options={"include_usage": True}).param == "stream_options"
    error = refusal(chat, stream=True, stream_options={"include_obfuscation": True})
    assert error.param == "stream_options.include_obfuscation"


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers():
    with pytest.raises(ApiError, match="100 tokens.*served length of 100") as caught:
        read_chat({"messages": HELLO}).params(100, SERVED)
    assert caught.value.code == "context_length_exceeded"
    assert read_chat({"messages": HELLO}).params(99, SERVED).max_tokens == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a": NaN}', b'"\xff"', b"[1]", b"null", b"[" * 100_000, b"1" * 5000]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes):
    with pytest.raises(ApiError, match="body") as caught:
        read_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_an_error_has_openais_shape():
    error = ApiError(400, "wrong", param="n", code="c")
    assert json.loads(json.dumps(error.document)) == {
        "error": {"message": "wrong", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
