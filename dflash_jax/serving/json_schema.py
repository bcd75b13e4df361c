"""Checks JSON values against the part of JSON Schema that this server's documents use.

One schema then both refuses a wrong request (`openai_api.py`) and is published (`openapi.py`). A
finding names the place and says in words what is needed there. Knows nothing of any field.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_LONGEST_SHOWN = 60
_PLURALS = {
    "string": "strings",
    "integer": "whole numbers",
    "number": "numbers",
    "array": "lists",
    "object": "objects",
}


class Mismatch(ValueError):
    """A value that its schema does not allow; `path` says where, as in `messages[0].role`."""

    def __init__(self, path: str, message: str):
        super().__init__(message)
        self.path = path


def check(value: Any, schema: Schema, path: str = "") -> Any:
    """The value as the rest of the program takes it: a whole float where an integer is due is one,
    and members of objects that are null are left out, as if they had not been given.

    Raises:
        Mismatch: the first thing that the schema does not allow.
    """
    if "anyOf" in schema:
        return _any_of(value, schema, path)
    kind = schema["type"]
    fits, read = _TYPES[kind]
    if not fits(value):
        raise _mismatch(value, schema, path)
    return read(value, schema, path)


def needed(schema: Schema) -> str:
    """What a schema asks for, in words: `a number from 0 to 1`."""
    if "anyOf" in schema:
        return " or ".join(needed(one) for one in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    match schema["type"]:
        case "number" | "integer" as kind:
            word = "a number" if kind == "number" else "a whole number"
            return " ".join([word, *_bounds(schema)])
        case "string":
            return "a string" if not schema.get("minLength") else "a string that is not empty"
        case "array":
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            size = f"{least} to {most}" if most is not None else f"{least} or more"
            return f"a list of {size} {_PLURALS[schema['items'].get('type', 'object')]}"
        case "boolean":
            return "true or false"
    return "an object"


def _bounds(schema: Schema) -> list[str]:
    words = (
        ("minimum", ">="),
        ("exclusiveMinimum", ">"),
        ("maximum", "<="),
        ("exclusiveMaximum", "<"),
    )
    found = [f"{sign} {schema[name]:.10g}" for name, sign in words if name in schema]
    return [" and ".join(found)] if found else []


def _mismatch(value: Any, schema: Schema, path: str) -> Mismatch:
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "…"
    return Mismatch(path, f"{path}={shown}: {needed(schema)} is needed")


def _any_of(value: Any, schema: Schema, path: str) -> Any:
    """The alternative that allows the value; if none does, the only one of its type explains."""
    candidates = [one for one in schema["anyOf"] if _TYPES[one["type"]][0](value)]
    for one in candidates:
        try:
            return check(value, one, path)
        except Mismatch:
            if len(candidates) == 1:
                raise
    raise _mismatch(value, schema, path)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_integer(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _within(value: int | float, schema: Schema) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


def _read_number(value: Any, schema: Schema, path: str) -> float:
    if not _within(value, schema):
        raise _mismatch(value, schema, path)
    return float(value)


def _read_integer(value: Any, schema: Schema, path: str) -> int:
    if not _within(value, schema):
        raise _mismatch(value, schema, path)
    return int(value)


def _read_string(value: Any, schema: Schema, path: str) -> str:
    if len(value) < schema.get("minLength", 0) or value not in schema.get("enum", (value,)):
        raise _mismatch(value, schema, path)
    return value


def _read_array(value: Any, schema: Schema, path: str) -> list[Any]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        raise _mismatch(value, schema, path)
    return [check(one, schema["items"], f"{path}[{index}]") for index, one in enumerate(value)]


def _read_object(value: Any, schema: Schema, path: str) -> dict[str, Any]:
    """Members by their own schemas; with `additionalProperties` a map of any names."""
    given = {name: one for name, one in value.items() if one is not None}
    if len(given) > schema.get("maxProperties", len(given)):
        raise Mismatch(path, f"{path}: at most {schema['maxProperties']} entries are possible")
    known, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    pattern = schema.get("propertyNames", {}).get("pattern")
    read = {}
    for name, one in given.items():
        inner = f"{path}.{name}" if path else name
        if pattern is not None and not re.search(pattern, name, re.ASCII):
            raise Mismatch(path, f"{path}: names such as {pattern} are needed, not {name!r}")
        if name not in known and not others:
            fields = ", ".join(sorted(known))
            raise Mismatch(inner, f"{inner} is not supported here; the fields are {fields}")
        read[name] = check(one, known.get(name, others), inner)
    for name in schema.get("required", ()):
        if name not in read:
            inner = f"{path}.{name}" if path else name
            raise Mismatch(inner, f"{inner} is missing: {needed(known[name])} is needed")
    return read


_TYPES = {
    "number": (_is_number, _read_number),
    "integer": (_is_integer, _read_integer),
    "string": (lambda value: isinstance(value, str), _read_string),
    "boolean": (lambda value: isinstance(value, bool), lambda value, schema, path: value),
    "array": (lambda value: isinstance(value, list), _read_array),
    "object": (lambda value: isinstance(value, dict), _read_object),
}
