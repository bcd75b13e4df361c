"""One tensor of a file on its device or devices.

From the memory map straight to where it stays: no second copy of the model exists at any time.
Which tensors, and how a mesh divides them, `safetensors.py` says.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from dflash_jax.weights.files import TensorEntry


def place(
    entry: TensorEntry,
    transposed: bool,
    dtype: DTypeLike | None,
    sharding: NamedSharding | None,
) -> jax.Array:
    """One tensor on its device or devices; only it is in host memory meanwhile."""
    view = entry.open()
    view = view.T if transposed else view
    wanted = view.dtype if dtype is None else np.dtype(dtype)
    if sharding is None:
        return jax.device_put(_owned(view, wanted)).block_until_ready()
    blocks: dict[str, np.ndarray] = {}

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        key = repr(index)  # devices that hold the same block (replicas) share one host array
        if key not in blocks:
            blocks[key] = _owned(view[index], wanted)
        return blocks[key]

    array = jax.make_array_from_callback(view.shape, sharding, block, dtype=wanted)
    return array.block_until_ready()


def place_index(entry: TensorEntry, sharding: NamedSharding | None) -> jax.Array:
    return jax.device_put(entry.open_index().astype(np.int32), sharding).block_until_ready()


def _owned(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in `dtype`, in memory that JAX may keep.

    A CPU device adopts a contiguous host array without copying it, so a map of the file must be
    copied first: the file may change or go. A transposed map is laid out anew by `device_put`.
    """
    if view.dtype != dtype:
        return view.astype(dtype)
    return np.array(view) if view.flags.c_contiguous else view
