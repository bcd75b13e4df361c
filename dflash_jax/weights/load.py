"""The front door: a model's name or folder becomes a module on the device, ready to run.

Decides the folder (`hub.py`), the dtype, the module's abstract shape and the reader (safetensors or
Orbax); reads nothing itself. A random model is never built: shapes come from `nnx.eval_shape`, and
parameters fill them one by one.
"""

from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.config import DTYPES, DrafterConfig, TargetConfig, read_config
from dflash_jax.errors import ConfigError
from dflash_jax.models import DFlashDrafter, Target, build_drafter, build_target
from dflash_jax.models.sizes import Shapes, drafter_shapes, target_shapes
from dflash_jax.weights import names, orbax, safetensors, vocabulary
from dflash_jax.weights.hub import resolve_model
from dflash_jax.weights.match import filled
from dflash_jax.weights.names import Kind

Model = TypeVar("Model", Target, DFlashDrafter)


def load_target(
    path: str | Path, *, dtype: str = "auto", mesh: Mesh | None = None, revision: str | None = None
) -> Target:
    """Loads a target from a folder, a hub id or `"demo"`.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, else bfloat16.
        mesh: devices to divide the parameters over (axis "tensor"); None: the default device.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: no such folder, no config, or weights that do not fit the config.
        ConfigError: a model that is not supported, a wrong dtype, a mesh that does not divide it.
        DownloadError: the hub id cannot be fetched.
    """
    folder = resolve_model(path, revision=revision, kind="target")
    return _load(abstract_target(folder), folder, "target", dtype, mesh)


def load_drafter(
    path: str | Path, *, dtype: str = "auto", mesh: Mesh | None = None, revision: str | None = None
) -> DFlashDrafter:
    """Loads a drafter; arguments and errors as `load_target`.

    It has what its checkpoint has: usually no embedding and no head. `vocabulary.for_target` gives
    one with a reduced vocabulary its rows of the target's head.
    """
    folder = resolve_model(path, revision=revision, kind="drafter")
    drafter = _load(abstract_drafter(folder), folder, "drafter", dtype, mesh)
    vocabulary.check_offsets(folder, drafter)
    return drafter


def check_files(folder: str | Path, kind: Kind, *, vocab_size: int | None = None) -> None:
    """Whether a folder's weights fit its config, from headers alone; starts no backend.

    Args:
        vocab_size: of the target that a drafter is for; a reduced draft vocabulary is within it.

    Raises:
        CheckpointError: with everything that is missing, too much or different.
    """
    if orbax.is_checkpoint(folder):
        return  # its parameters are compared with the config when they are restored
    safetensors.select_shapes(_config_shapes(Path(folder), kind), folder, kind=kind)
    if kind == "drafter":
        vocabulary.check_folder(folder, vocab_size)


def abstract_target(folder: str | Path) -> Target:
    """The target that a folder's config describes, shapes only; starts no backend."""
    config = TargetConfig.from_folder(Path(folder))
    # The dtype of a shape is never read: loading decides it.
    return nnx.eval_shape(lambda: build_target(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def abstract_drafter(folder: str | Path) -> DFlashDrafter:
    """The drafter that a folder's config describes, shapes only; starts no backend."""
    config = DrafterConfig.from_folder(Path(folder))
    return nnx.eval_shape(lambda: build_drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def stored_shapes(folder: str | Path, kind: Kind) -> Shapes:
    """Shapes of the parameters that loading makes, padded vocabulary rows included.

    Raises:
        CheckpointError: as `check_files`.
    """
    if orbax.is_checkpoint(folder):
        return orbax.stored_shapes(folder)
    wanted = _config_shapes(Path(folder), kind)
    return safetensors.stored_shapes(safetensors.select_shapes(wanted, folder, kind=kind))


def unloaded(folder: str | Path, kind: Kind, *, dtype: str, mesh: Mesh | None = None) -> Any:
    """The module that `load_target` or `load_drafter` gives, with shapes in place of arrays.

    Dtype, padding and sharding are those of the arrays to come, so that programs compile before
    a byte of weights is read.
    """
    model = abstract_target(folder) if kind == "target" else abstract_drafter(folder)
    wanted = resolve_dtype(dtype, mesh)
    shapes = {
        path: jax.ShapeDtypeStruct(
            shape,
            jnp.int32 if names.is_index(path) else wanted,
            sharding=None if mesh is None else names.sharding_for(path, shape, mesh),
        )
        for path, shape in stored_shapes(folder, kind).items()
    }
    return filled(model, shapes)


def resolve_dtype(dtype: str, mesh: Mesh | None = None) -> np.dtype:
    """The parameters' dtype: "auto" is float32 on a CPU (which emulates bfloat16), else bfloat16.

    Raises:
        ConfigError: a name that is not in `DTYPES`.
    """
    _check_dtype(dtype)
    if dtype != "auto":
        return jnp.dtype(dtype)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)


def _config_shapes(folder: Path, kind: Kind) -> Shapes:
    if kind == "target":
        return target_shapes(TargetConfig.from_folder(folder))
    return drafter_shapes(DrafterConfig.from_folder(folder))


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported; supported: {', '.join(DTYPES)}")


def _load(model: Model, folder: Path, kind: Kind, dtype: str, mesh: Mesh | None) -> Model:
    """What files and options can say is said before anything starts a backend."""
    _check_dtype(dtype)
    if mesh is not None:
        names.check_mesh(model.config, kind, mesh)
    if orbax.is_checkpoint(folder):
        raw = read_config(folder)
        return orbax.restore(model, folder, raw, dtype=resolve_dtype(dtype, mesh), mesh=mesh)
    entries = safetensors.select(model, folder, kind=kind)
    return safetensors.read(model, entries, dtype=resolve_dtype(dtype, mesh), mesh=mesh)
