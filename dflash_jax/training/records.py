"""What a folder was begun with: options as JSON, and how a resume's differ from them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


def recorded(options: Any) -> dict[str, Any]:
    """A dataclass of options, as its JSON record reads back."""
    return json.loads(json.dumps(dataclasses.asdict(options)))


def with_defaults(record: Mapping[str, Any], of: type) -> dict[str, Any]:
    """A record of the dataclass `of` whose missing fields have their defaults.

    What a record does not name was added to the program later: it had its default then.
    """
    fields = dataclasses.fields(of)
    absent = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return json.loads(json.dumps(absent)) | dict(record)


def differences(begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """What differs, by name (`outer.inner` within an object): a phrase with both values."""
    found: dict[str, str] = {}
    for key in sorted(begun.keys() | wanted.keys()):
        then, now = begun.get(key), wanted.get(key)
        if isinstance(then, dict) and isinstance(now, dict):
            inner = differences(then, now)
            found |= {f"{key}.{name}": f"{key}.{said}" for name, said in inner.items()}
        elif then != now:
            found[key] = f"{key} was {then!r} and is {now!r}"
    return found
