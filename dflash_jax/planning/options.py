"""The options of `ServeConfig` as a list: for checking names, and for the documentation.

`docs/options.md` and the manifest that a test holds the options to are made from here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args, get_origin

from dflash_jax.config import ServeConfig
from dflash_jax.errors import ConfigError


class Option(NamedTuple):
    """One option: its name, type as users read it, default, and what it does."""

    name: str
    type: str
    default: Any
    help: str


def options() -> list[Option]:
    """Every field of `ServeConfig`, in order."""
    return [
        Option(field.name, _type_name(field.type), field.default, field.metadata["help"])
        for field in dataclasses.fields(ServeConfig)
    ]


def manifest() -> dict[str, dict[str, Any]]:
    """Type and default by name, as JSON can hold them."""
    return {one.name: {"type": one.type, "default": one.default} for one in options()}


def markdown() -> str:
    """`docs/options.md`."""
    lines = [
        "# Options",
        "",
        "Fields of `ServeConfig`: keyword arguments of `dflash_jax.LLM` and of "
        "`dflash_jax.plan_memory`, and with dashes most are options of `dflash-jax plan` and "
        "`dflash-jax serve`. This page is generated: "
        "`python -m dflash_jax.planning.options > docs/options.md`.",
        "",
        "| option | type | default | what it does |",
        "|---|---|---|---|",
    ]
    for one in options():
        kind = one.type.replace("|", "\\|")
        lines.append(f"| `{one.name}` | `{kind}` | `{one.default!r}` | {one.help} |")
    return "\n".join(lines) + "\n"


def serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """A `ServeConfig` of named options.

    Raises:
        ConfigError: a name that is no option, with the list of those that are.
    """
    names = [field.name for field in dataclasses.fields(ServeConfig)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; options: {', '.join(names)}")
    return ServeConfig(**given)


def _type_name(kind: Any) -> str:
    if get_args(kind) and "Literal" in str(get_origin(kind)):
        return " | ".join(map(repr, get_args(kind)))
    if get_args(kind) and "Union" in str(get_origin(kind)):
        return " | ".join(map(_type_name, get_args(kind)))
    if kind is type(None):
        return "None"
    return str(kind).removeprefix("typing.") if not isinstance(kind, type) else kind.__name__


if __name__ == "__main__":
    import json
    import sys

    text = json.dumps(manifest(), indent=2) + "\n" if "--json" in sys.argv else markdown()
    sys.stdout.buffer.write(text.encode())
