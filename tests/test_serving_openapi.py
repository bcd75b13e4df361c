"""The published document: it has every endpoint, and the very schemas that requests meet."""

import json
from typing import Any

import pytest

from dflash_jax.serving import openai_fields as fields
from dflash_jax.serving.json_schema import Mismatch, check, needed
from dflash_jax.serving.openapi import openapi_document, published
from dflash_jax.serving.service import Service
from fake_llm import FakeLLM
from serving_http import running


def test_it_names_every_endpoint_that_answers_and_their_methods():
    paths = openapi_document(1 << 20)["paths"]
    with Service(FakeLLM()) as service, running(service) as site:
        assert site.get("/openapi.json").document == openapi_document(1 << 20)
        for path, methods in paths.items():
            there = path.replace("{model}", "m")
            assert site.get(there).status == (200 if "get" in methods else 405)
            status = site.ask("POST", there, "{}").status
            assert status == (400 if "post" in methods else 405)


@pytest.mark.parametrize("schema", [fields.CHAT, fields.COMPLETION], ids=["chat", "completion"])
def test_every_field_is_described_and_nullable_unless_it_is_required(schema: Any):
    document = published(schema)
    assert document["additionalProperties"] is False
    for name, one in document["properties"].items():
        assert one["description"].endswith("."), name
        nullable = {"type": "null"} in one.get("anyOf", ())
        assert nullable == (name not in schema["required"]), name
    json.dumps(document)


@pytest.mark.parametrize("schema", [fields.CHAT, fields.COMPLETION], ids=["chat", "completion"])
def test_every_default_that_is_published_is_a_value_that_is_allowed(schema: Any):
    for name, one in schema["properties"].items():
        if "default" in one:
            assert check(one["default"], one, name) == one["default"]


def test_extensions_of_openais_api_say_so():
    said = {n for n, one in fields.SAMPLING.items() if fields.EXTENSION in one["description"]}
    own = {"top_k", "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids"}
    assert said == {*own, "speculate"}


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1, "exclusiveMaximum": 5},
        "b": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 2},
        "c": {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["x", "y"]}]},
    },
    "required": ["a"],
}


@pytest.mark.parametrize(
    "value, path, said",
    [
        ([], "", "=[]: an object is needed"),
        ({}, "a", "a is missing: a whole number >= 1 and < 5 is needed"),
        ({"a": None}, "a", "a is missing"),
        ({"a": 5}, "a", "a=5: a whole number >= 1 and < 5 is needed"),
        ({"a": 1.5}, "a", "a=1.5: a whole number"),
        ({"a": True}, "a", "a=True: a whole number"),
        ({"a": float("inf")}, "a", "a=inf: a whole number"),
        ({"a": 1, "b": ["x", ""]}, "b[1]", "a string that is not empty is needed"),
        ({"a": 1, "b": ["x"] * 3}, "b", "a list of 0 to 2 strings is needed"),
        ({"a": 1, "c": "z"}, "c", "c='z': one of 'x', 'y' is needed"),
        ({"a": 1, "c": 5}, "c", "c=5: true or false or one of 'x', 'y' is needed"),
        ({"a": 1, "d": 5}, "d", "d is not supported here; the fields are a, b, c"),
    ],
)
def test_a_value_that_breaks_its_schema_is_named_with_what_is_needed(
    value: Any, path: str, said: str
):
    with pytest.raises(Mismatch) as caught:
        check(value, SCHEMA)
    assert caught.value.path == path
    assert said in str(caught.value)


def test_a_value_comes_back_as_the_program_takes_it():
    assert check({"a": 2.0, "b": None, "c": "x"}, SCHEMA) == {"a": 2, "c": "x"}
    assert isinstance(check({"a": 2.0}, SCHEMA)["a"], int)
    assert isinstance(check(2, {"type": "number"}), float)
    long = "x" * 500
    with pytest.raises(Mismatch) as caught:
        check(long, {"type": "number"}, "a")
    assert len(str(caught.value)) < 120
    assert needed({"type": "object"}) == "an object"
