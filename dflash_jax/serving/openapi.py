"""The OpenAPI document at `/openapi.json`, from the very schemas that requests are checked with."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.serving import openai_fields as fields
from dflash_jax.version import VERSION

_ERRORS = {
    400: "The request is wrong or asks for what is not supported; `param` names the field.",
    401: "The API key is missing or another one.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "A fault of the server.",
    503: "The server is shutting down, or its engine has failed.",
    504: "The request took longer than the server allows.",
}
_OBJECT = {"type": "object"}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
    "description": "Of each event: its data is a chunk as JSON, or [DONE] at the end.",
}


def openapi_document(max_body_bytes: int) -> dict[str, Any]:
    """The document; OpenAPI 3.1, whose schemas are JSON Schema."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dflash_jax",
            "version": VERSION,
            "description": "OpenAI-compatible completions, decoded with DFlash. Fields that are "
            "not listed are refused by name; null is the same as leaving a field out. Bodies have "
            f"{max_body_bytes} bytes at most.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _text_endpoint("chat", "Continue a conversation.", fields.CHAT)
            },
            "/v1/completions": {
                "post": _text_endpoint("completion", "Continue a text.", fields.COMPLETION)
            },
            "/v1/models": {"get": _reading("models", "The model that is served.", (401,))},
            "/v1/models/{model}": {
                "get": _reading("model", "The same by its name.", (401, 404))
                | {
                    "parameters": [
                        {
                            "name": "model",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string", "minLength": 1},
                        }
                    ]
                }
            },
            "/metrics": {"get": _metrics()},
            "/health": {"get": _open("health", "Whether the engine runs.")},
            "/ready": {"get": _open("ready", "Whether new requests are taken.")},
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def published(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A request's schema as others have to read it: null is taken for any field that may be left
    out, and no other fields are."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [published(one) for one in schema["anyOf"]]}
    if schema["type"] == "array":
        return {**schema, "items": published(schema["items"])}
    if "properties" not in schema:
        return dict(schema)
    required = schema.get("required", ())
    members = {
        name: published(one) if name in required else _or_null(published(one))
        for name, one in schema["properties"].items()
    }
    return {**schema, "properties": members, "additionalProperties": False}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    said = {name: schema.pop(name) for name in ("description", "default") if name in schema}
    inner = schema["anyOf"] if "anyOf" in schema else [schema]
    return {"anyOf": [*inner, {"type": "null"}], **said}


def _content(schema: Mapping[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _errors(*codes: int) -> dict[str, Any]:
    error = _content({"$ref": "#/components/schemas/Error"})
    return {str(code): {"description": _ERRORS[code], "content": error} for code in codes}


def _text_endpoint(name: str, summary: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    whole, events = _content(_answer()), _content(_EVENT, "text/event-stream")
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": _content(published(schema))},
        "responses": {
            "200": {
                "description": "The answer; a stream of events with `stream`.",
                "content": {**whole, **events},
            },
            **_errors(*_ERRORS),
        },
    }


def _answer() -> dict[str, Any]:
    figures = {
        "request_id": {"type": "string"},
        "speculation": {"type": "string", "enum": ["dflash", "suffix", "none"]},
        "max_draft_len": {"type": "integer", "minimum": 0},
        "acceptance_length": {"type": ["number", "null"]},
        "num_rounds": {"type": "integer"},
        "num_drafts": {"type": "integer"},
        "num_accepted_drafts": {"type": "integer"},
        "reused_prompt_tokens": {"type": "integer"},
    }
    members = {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": _OBJECT, "minItems": 1},
        "usage": {
            "type": "object",
            "properties": {
                name: {"type": "integer"}
                for name in ("prompt_tokens", "completion_tokens", "total_tokens")
            },
            "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
        },
        "dflash": {
            "type": "object",
            "properties": figures,
            "required": list(figures),
            "description": "How the request was decoded.",
        },
    }
    return {"type": "object", "properties": members, "required": list(members)}


def _reading(name: str, summary: str, errors: tuple[int, ...]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "OK", "content": _content(_OBJECT)},
            **_errors(*errors),
        },
    }


def _metrics() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "operationId": "metrics",
        "summary": "For Prometheus.",
        "responses": {"200": {"description": "OK", "content": text}, **_errors(401)},
    }


def _open(name: str, summary: str) -> dict[str, Any]:
    """An endpoint that needs no key."""
    states = {"200": "Yes.", "503": "No."}
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {
            code: {"description": word, "content": _content(_OBJECT)}
            for code, word in states.items()
        },
    }
