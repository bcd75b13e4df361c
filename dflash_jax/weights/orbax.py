"""Converted parameters as an Orbax checkpoint: bit-exact, and straight to the devices of a mesh.

The record holds parameters as the module stores them ([in, out]) under their dotted paths, with the
config they were made from, which a restore must match. Uncompressed: random-looking weights shrink
by a tenth and decompressing them made loading eight times as long. Beside `params/` the folder has
what a Hugging Face folder has; `convert.py` puts it there, `load.py` reads either kind.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from dflash_jax.errors import CheckpointError
from dflash_jax.weights import names
from dflash_jax.weights.match import (
    Model,
    Stored,
    compare,
    filled,
    parameters,
    refuse,
    wanted_shapes,
)
from dflash_jax.weights.names import ParameterPath
from dflash_jax.weights.staging import staged

PARAMS = "params"
# Bookkeeping that exporters add and that says nothing about the parameters.
_IGNORED_KEYS = ("_name_or_path", "transformers_version")
# Restoring holds host copies of what is in flight; this bounds it (a larger tensor goes alone).
# Each request costs about 20 ms, so smaller groups are slower.
_IN_FLIGHT_BYTES = 2**26


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder holds converted parameters."""
    return (Path(folder) / PARAMS / "_CHECKPOINT_METADATA").is_file()


def save(
    module: nnx.Module,
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Writes a folder with `config.json` and `params/`; it appears when it is whole.

    Raises:
        CheckpointError: the folder is there already and `overwrite` is not set.
    """
    with staged(folder, overwrite=overwrite) as partial:
        write(module, partial, config)


def write(module: nnx.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Writes `config.json` and `params/` into a folder that the caller made and guards."""
    flat = {names.dotted(path): array for path, array in parameters(module).items()}
    text = json.dumps(dict(config), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    with _checkpointer() as checkpointer:
        checkpointer.save(
            folder.absolute() / PARAMS,
            args=ocp.args.PyTreeSave(flat),
            custom_metadata={"config": json.loads(text)},
        )


def restore(
    module: Model,
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """Fills an abstract module from a converted folder; returns the real module.

    Args:
        config: the raw config that the module was built from; must equal the recorded one.
        dtype: what every parameter becomes; None keeps what was saved, bit for bit.
        mesh: divides parameters as `names.sharding_for` says; None: the default device.

    Raises:
        CheckpointError: no or damaged parameters, another config (every differing key with both
            values), or parameters that do not fit the module.
        ConfigError: the mesh does not divide a parameter evenly.
    """
    folder = Path(folder)
    place = folder.absolute() / PARAMS
    with _checkpointer() as checkpointer:
        recorded, arrays = _metadata(checkpointer, place)
        refuse(folder, _config_differences(recorded, config))
        found = {
            names.parameter_path(name): Stored(name, PARAMS, tuple(array.shape))
            for name, array in arrays.items()
        }
        refuse(folder, compare(wanted_shapes(module), found, PARAMS))
        arguments = {
            stored.name: ocp.ArrayRestoreArgs(
                sharding=_sharding(path, stored.shape, mesh),
                global_shape=stored.shape,
                dtype=_dtype(path, arrays[stored.name].dtype, dtype),
            )
            for path, stored in found.items()
        }
        values: dict[ParameterPath, jax.Array] = {}
        for group in _groups(arguments):
            read = _read(checkpointer, place, group)
            values |= {names.parameter_path(name): value for name, value in read.items()}
    return filled(module, values)


def stored_shapes(folder: str | Path) -> dict[ParameterPath, tuple[int, ...]]:
    """Shapes of a converted folder's parameters; nothing is read.

    Raises:
        CheckpointError: no or damaged parameters.
    """
    with _checkpointer() as checkpointer:
        _, arrays = _metadata(checkpointer, Path(folder).absolute() / PARAMS)
    return {names.parameter_path(name): tuple(array.shape) for name, array in arrays.items()}


def _metadata(checkpointer: ocp.Checkpointer, place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recorded config, and shape and dtype of every parameter by dotted path."""
    try:
        metadata: Any = checkpointer.metadata(place)
        recorded, arrays = (metadata.custom_metadata or {}).get("config"), metadata.item_metadata
    except Exception as error:  # Orbax raises what its storage layers raise
        raise CheckpointError(_damaged(place, _first_line(error))) from error
    # What Orbax cannot read it logs and leaves out.
    if recorded is None or arrays is None:
        missing = "config" if recorded is None else "list of parameters"
        raise CheckpointError(_damaged(place, f"its {missing} is missing or unreadable"))
    return recorded, dict(arrays)


def _damaged(place: Path, why: str) -> str:
    return f"{place} holds no readable converted parameters: {why}; convert the model again"


def _first_line(error: Exception) -> str:
    """What happened, without the storage layer's configuration that follows."""
    text = str(error).split(" See full TensorStore details", 1)[0]
    return text.splitlines()[0] if text else type(error).__name__


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _sharding(path: ParameterPath, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return names.sharding_for(path, shape, mesh)


def _dtype(path: ParameterPath, recorded: Any, wanted: DTypeLike | None) -> np.dtype:
    return np.dtype(recorded if wanted is None or names.is_index(path) else wanted)


def _config_differences(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    given = json.loads(json.dumps(dict(given)))  # tuples become lists, as in the record
    keys = [key for key in dict.fromkeys([*recorded, *given]) if key not in _IGNORED_KEYS]
    return [
        f"config key {key!r} was {_shown(recorded, key)} when the parameters were converted and is "
        f"{_shown(given, key)} now: restore config.json, or convert again"
        for key in keys
        if _shown(recorded, key) != _shown(given, key)
    ]


def _shown(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "absent"


def _groups(
    arguments: Mapping[str, ocp.ArrayRestoreArgs],
) -> Iterator[dict[str, ocp.ArrayRestoreArgs]]:
    """Parameters in groups of at most `_IN_FLIGHT_BYTES`."""
    group: dict[str, ocp.ArrayRestoreArgs] = {}
    size = 0
    for name, argument in arguments.items():
        nbytes = math.prod(argument.global_shape or ()) * np.dtype(argument.dtype).itemsize
        if group and size + nbytes > _IN_FLIGHT_BYTES:
            yield group
            group, size = {}, 0
        group[name] = argument
        size += nbytes
    if group:
        yield group


def _read(
    checkpointer: ocp.Checkpointer, place: Path, group: Mapping[str, ocp.ArrayRestoreArgs]
) -> dict[str, jax.Array]:
    request = ocp.args.PyTreeRestore(
        item=dict.fromkeys(group, 0), restore_args=dict(group), partial_restore=True
    )
    try:
        return jax.block_until_ready(checkpointer.restore(place, args=request))
    except Exception as error:  # Orbax raises what its storage layers raise
        names_read = f"{next(iter(group))} and {len(group) - 1} more"
        why = f"reading {names_read} failed: {_first_line(error)}"
        raise CheckpointError(_damaged(place, why)) from error
