"""Values out of a `config.json`: read, required, and checked to be what they should be.

What they mean is said by `target.py` and `drafter.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError, ConfigError


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder.

    Raises:
        CheckpointError: the folder or its `config.json` is missing or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: give a folder in Hugging Face layout")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, not a JSON object")
    return raw


def require(raw: Mapping[str, Any], key: str, what: str) -> Any:
    if raw.get(key) is None:
        raise ConfigError(f"the {what} config has no {key!r}: add it to config.json")
    return raw[key]


def positive(raw: Mapping[str, Any], key: str, what: str) -> int:
    value = require(raw, key, what)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"the {what} config has {key}={value!r}: a whole number >= 1 is needed")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(v) for v in value)
