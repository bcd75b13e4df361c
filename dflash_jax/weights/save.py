"""Writing a module's parameters as a published checkpoint: names, layout and shards as usual.

One tensor is in host memory at a time. The folder's other files (config, tokenizer) are the
caller's; reading back is `safetensors.py`.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dflash_jax.errors import CheckpointError
from dflash_jax.weights import names
from dflash_jax.weights.files import DTYPES, INDEX_DTYPES
from dflash_jax.weights.match import parameters
from dflash_jax.weights.names import Kind, ParameterPath
from dflash_jax.weights.safetensors import INDEX, SINGLE

# The size at which published checkpoints are usually split.
MAX_SHARD_BYTES = 5 * 10**9

_CODES = {dtype: code for code, dtype in {**DTYPES, **INDEX_DTYPES}.items()}


class Outgoing(NamedTuple):
    """A tensor to write: `read` is called when its turn comes, so one is in memory at a time."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_parameters(
    module: nnx.Module,
    folder: str | Path,
    *,
    kind: Kind,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    buffers: Sequence[Outgoing] = (),
) -> None:
    """Writes `model.safetensors`, or shards with an index above `max_shard_bytes`, into a folder.

    Args:
        dtype: what every parameter becomes in the file but offsets, which are int64 in every
            file; None keeps each one's own.
        buffers: tensors of the layout that are no parameters.

    Raises:
        CheckpointError: a dtype that the format, as read here, does not have.
    """
    folder = Path(folder)
    tensors = [_outgoing(path, array, kind, dtype) for path, array in parameters(module).items()]
    tensors += buffers
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / SINGLE, tensors)
        (folder / INDEX).unlink(missing_ok=True)  # an older, sharded export would win over it
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard)
        weight_map |= {tensor.name: file for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, tensors: Iterable[Outgoing]) -> None:
    """Writes one safetensors file in the given order; it appears under its name when whole.

    Raises:
        CheckpointError: a dtype that the format, as read here, does not have.
    """
    tensors = list(tensors)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.read())
            file.write(data.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _header(tensors: Iterable[Outgoing]) -> bytes:
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in _CODES:
            raise CheckpointError(
                f"tensor {tensor.name} has dtype {tensor.dtype}, which is not written; supported: "
                f"{', '.join(map(str, _CODES))}"
            )
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned, as the format asks
    return len(text).to_bytes(8, "little") + text


def _outgoing(
    path: ParameterPath, value: jax.Array, kind: Kind, dtype: DTypeLike | None
) -> Outgoing:
    transposed = names.is_transposed(path)
    wanted = np.dtype(value.dtype if dtype is None else dtype)
    if names.is_index(path):
        wanted = np.dtype(np.int64)

    def read() -> np.ndarray:
        array = np.asarray(value).astype(wanted, copy=False)
        return array.T if transposed else array

    shape = value.shape[::-1] if transposed else value.shape
    return Outgoing(names.tensor_name(path, kind), wanted, shape, read)


def _split(tensors: list[Outgoing], limit: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
