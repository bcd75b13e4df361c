"""One safetensors file: its header, checked, and its tensors as memory maps.

The header is read and checked here, byte offsets included, because a damaged file must be refused
by name and because reading one tensor must not load the others. Which files make a checkpoint is
the subject of `safetensors.py`; writing is in `save.py`. Nothing here starts a JAX backend.

Format (github.com/huggingface/safetensors): 8 bytes little-endian n, n bytes of JSON {name: {dtype,
shape, data_offsets: [begin, end]}}, then the data, without gaps, offsets counted from its start.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import CheckpointError

# The format's own bound on n; a real header is a few hundred bytes a tensor.
MAX_HEADER_BYTES = 100_000_000

# What can be a parameter. NumPy knows bf16 and f8 as the extension types that JAX registers.
DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
# Buffers of whole numbers and flags; no parameter of a model has one of these.
INDEX_DTYPES: Mapping[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
# Sizes of everything else that the format knows, so that its offsets can be checked.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_POINTER = b"version https://git-lfs"


class TensorEntry(NamedTuple):
    """Where one tensor lies: `offset` counts from the start of the file, in bytes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def open(self) -> np.ndarray:
        """A read-only memory map of this tensor alone; it goes when the array goes.

        Raises:
            CheckpointError: the dtype cannot be a parameter.
        """
        return self._map(DTYPES)

    def open_index(self) -> np.ndarray:
        """The same of a buffer of whole numbers or flags.

        Raises:
            CheckpointError: the dtype is neither.
        """
        return self._map(INDEX_DTYPES)

    def _map(self, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
        if problem := dtype_problem(self, dtypes):
            raise CheckpointError(f"{self.file.name}: tensor {self.name}: {problem}")
        if self.nbytes == 0:
            return np.empty(self.shape, dtypes[self.dtype])
        return np.memmap(self.file, dtypes[self.dtype], "r", self.offset, self.shape)


def dtype_problem(entry: TensorEntry, dtypes: Mapping[str, np.dtype] = DTYPES) -> str | None:
    """What is wrong with the entry's dtype, or None if it is one of those."""
    if entry.dtype in dtypes:
        return None
    return f"unsupported dtype {entry.dtype}; supported: {', '.join(dtypes)}"


def read_header(path: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file, after checking that the file can hold them.

    Raises:
        CheckpointError: not a safetensors file, truncated, or offsets that overlap, leave gaps, end
            beyond the file or do not fit the shape; names the file and what is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is not there: place the file, or download it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        _check_start(path, start + file.read(len(_POINTER) - 8), size)
        length = int.from_bytes(start, "little")
        file.seek(8)
        raw = _parse(path, file.read(length))
    raw.pop("__metadata__", None)
    entries = {name: _entry(path, name, spec, 8 + length) for name, spec in raw.items()}
    _check_layout(path, list(entries.values()), 8 + length, size)
    return entries


def _check_start(path: Path, start: bytes, size: int) -> None:
    if start == _POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`"
        )
    if size < 8:
        raise CheckpointError(
            f"{path} has {size} bytes, too few for a safetensors header: it is truncated or not a "
            "safetensors file"
        )
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {length} bytes, over the format's {MAX_HEADER_BYTES}: "
            "it is not a safetensors file, or damaged"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path} announces a header of {length} bytes but has only {size - 8} after the first "
            "8: it is truncated or not a safetensors file"
        )


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(header, object_pairs_hook=_no_duplicates)
    except ValueError as error:  # JSON and UTF-8 errors are both ValueErrors
        raise CheckpointError(f"{path} is not a safetensors file: its header: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON object")
    return raw


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{max(keys, key=keys.count)!r} is there twice")
    return found


def _entry(path: Path, name: str, spec: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape = str(spec["dtype"]), tuple(int(size) for size in spec["shape"])
        begin, end = (int(offset) for offset in spec["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name} has a malformed header entry") from error
    if min((begin, end - begin, *shape)) < 0:
        raise CheckpointError(
            f"{path}: tensor {name} has a negative size: shape {list(shape)}, offsets "
            f"{[begin, end]}"
        )
    bits = _BITS.get(dtype)
    needed = None if bits is None else -(-math.prod(shape) * bits // 8)
    if needed is not None and needed != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} and dtype {dtype} needs {needed} bytes, "
            f"its offsets {[begin, end]} give {end - begin}"
        )
    return TensorEntry(path, name, dtype, shape, data_start + begin, end - begin)


def _check_layout(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    expected, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {entry.name} ends at byte "
                f"{entry.offset + entry.nbytes}, the file at byte {size}: download it again"
            )
        if entry.offset != expected:
            what = "overlaps" if entry.offset < expected else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {entry.name} {what} {previous}: it starts at byte "
                f"{entry.offset}, byte {expected} was due; the file is damaged"
            )
        expected, previous = entry.offset + entry.nbytes, f"tensor {entry.name}"
    if expected != size:
        raise CheckpointError(
            f"{path} has {size - expected} bytes after its last tensor; the file is damaged"
        )
