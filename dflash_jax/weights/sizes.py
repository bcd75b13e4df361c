"""Bytes of a model's weights: exact from headers, else from the config; roughly from a folder.

Nothing here reads a tensor or starts a backend.
"""

import math
import os
from pathlib import Path

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.models.sizes import Shapes, drafter_shapes, gathered_head, target_shapes
from dflash_jax.weights import orbax
from dflash_jax.weights.names import (
    MESH_AXES,
    ParameterPath,
    is_index,
    is_vocabulary,
    logical_axes,
    parameter_path,
)
from dflash_jax.weights.safetensors import Checkpoint, has_weights

INDEX_BYTES = 4
"""Offsets are int32, whatever the dtype of the weights."""
_SUFFIXES = (".safetensors", ".bin")


def checkpoint_bytes(path: str | Path | None) -> int | None:
    """Bytes of the weight files below a folder; None where that is unknown.

    Sums `.safetensors` at any depth, and only if that is 0, `.bin`. A hub id, a missing folder, a
    folder without weights and a folder that cannot be read are unknown, which is not 0.
    """
    if not path or not os.path.isdir(path):
        return None
    sizes = dict.fromkeys(_SUFFIXES, 0)
    try:
        for folder, _, files in os.walk(path, onerror=_raise):
            for name in files:
                suffix = os.path.splitext(name)[1]
                if suffix in sizes:
                    sizes[suffix] += os.path.getsize(os.path.join(folder, name))
    except OSError:
        return None
    return next((size for size in sizes.values() if size), None)


def weight_bytes(
    config: TargetConfig | DrafterConfig,
    folder: str | Path | None,
    *,
    dtype_bytes: int,
    shards: int = 1,
) -> int:
    """Bytes of the parameters that one device holds after loading.

    Rows of the target's head that a reduced draft vocabulary gathers are the drafter's.

    Args:
        folder: where the weights are; vocabulary rows are those of the file (padding included).
            None, or a folder without weights: the config's.
        shards: devices on the mesh axis that divides heads, MLP width and vocabulary.

    Raises:
        CheckpointError: the weight files are there and damaged.
    """
    shapes = target_shapes(config) if isinstance(config, TargetConfig) else drafter_shapes(config)
    if folder is not None:
        shapes |= {p: s for p, s in _stored_tables(Path(folder)).items() if p in shapes}
    if isinstance(config, DrafterConfig):
        shapes |= gathered_head(config)
    return sum(
        _size(path, shape, shards) * (INDEX_BYTES if is_index(path) else dtype_bytes)
        for path, shape in shapes.items()
    )


def _raise(error: OSError) -> None:
    raise error


def _stored_tables(folder: Path) -> Shapes:
    """Embedding and head as the files have them."""
    if orbax.is_checkpoint(folder):
        stored = orbax.stored_shapes(folder)
    elif has_weights(folder):
        tensors = Checkpoint.from_folder(folder).tensors
        stored = {parameter_path(name): entry.shape for name, entry in tensors.items()}
    else:
        stored = {}
    return {path: shape for path, shape in stored.items() if is_vocabulary(path)}


def _size(path: ParameterPath, shape: tuple[int, ...], shards: int) -> int:
    axes = logical_axes(path)
    return math.prod(
        -(-size // shards) if MESH_AXES.get(axis) else size
        for axis, size in zip(axes, shape, strict=True)
    )
