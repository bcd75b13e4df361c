"""A folder of safetensors files as one checkpoint, read into a module.

Single file or shards with an index; every disagreement between index, shards and config is an error
that names tensor and file, all of them at once. Tensors go to the device one by one (`place.py`).
The file format is `files.py`, writing `save.py`; what is compared with what, `match.py`; which
model a folder holds, `load.py`.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from dflash_jax.errors import CheckpointError
from dflash_jax.weights import names
from dflash_jax.weights.files import (
    DTYPES,
    INDEX_DTYPES,
    TensorEntry,
    dtype_problem,
    read_header,
)
from dflash_jax.weights.match import Model, Stored, compare, filled, refuse, wanted_shapes
from dflash_jax.weights.names import Kind, ParameterPath
from dflash_jax.weights.place import place, place_index

__all__ = [
    "Checkpoint",
    "has_weights",
    "load_parameters",
    "read",
    "read_header",
    "select",
    "select_shapes",
    "stored_shapes",
]

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COMPARED_BYTES = 2**24
_HEAD: ParameterPath = ("lm_head", "weight")


class Checkpoint(NamedTuple):
    """The tensors of a folder: name → where it lies. `source` is the file that names them all."""

    folder: Path
    source: str
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Checkpoint":
        """Reads the index and every header; no tensor is read.

        Raises:
            CheckpointError: no weights, or index and shards disagree in any way.
        """
        folder = Path(folder)
        if (folder / INDEX).is_file():
            weight_map = _read_index(folder / INDEX)
            return cls(folder, INDEX, _indexed(folder, weight_map))
        if not (folder / SINGLE).is_file():
            raise CheckpointError(_no_weights(folder))
        return cls(folder, SINGLE, read_header(folder / SINGLE))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.nbytes for entry in self.tensors.values())


def has_weights(folder: str | Path) -> bool:
    """Whether a folder has a file that `Checkpoint.from_folder` starts from."""
    return any((Path(folder) / name).is_file() for name in (SINGLE, INDEX))


def load_parameters(
    module: Model,
    folder: str | Path,
    *,
    kind: Kind,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """Fills an abstract module (`nnx.eval_shape`) from a folder: `select`, then `read`."""
    return read(module, select(module, folder, kind=kind), dtype=dtype, mesh=mesh)


def select(
    module: nnx.Module, folder: str | Path, *, kind: Kind
) -> dict[ParameterPath, TensorEntry]:
    """Where each parameter of a module to be loaded lies, in the order of the files.

    Starts no backend. Files that are left aside are noticed here, where loading begins: headers
    are read more often than weights.

    Raises:
        CheckpointError: with everything that the folder lacks, has too much or has differently.
    """
    checkpoint = Checkpoint.from_folder(folder)
    _notice_strays(checkpoint)
    return _selected(checkpoint, wanted_shapes(module), kind)


def select_shapes(
    wanted: Mapping[ParameterPath, tuple[int, ...]], folder: str | Path, *, kind: Kind
) -> dict[ParameterPath, TensorEntry]:
    """`select` to look and not to load, for a module whose shapes are known without it."""
    return _selected(Checkpoint.from_folder(folder), wanted, kind)


def _selected(
    checkpoint: Checkpoint, wanted: Mapping[ParameterPath, tuple[int, ...]], kind: Kind
) -> dict[ParameterPath, TensorEntry]:
    found, findings = _found(checkpoint, wanted, kind)
    if kind == "target" and _HEAD not in wanted:
        findings += _drop_tied_head(found)
    stored = {path: Stored(e.name, e.file.name, e.shape) for path, e in found.items()}
    in_file = {p: s[::-1] if names.is_transposed(p) else s for p, s in wanted.items()}
    refuse(checkpoint.folder, [*findings, *compare(in_file, stored, checkpoint.source)])
    return dict(sorted(found.items(), key=lambda item: (item[1].file, item[1].offset)))


def stored_shapes(
    entries: Mapping[ParameterPath, TensorEntry],
) -> dict[ParameterPath, tuple[int, ...]]:
    """Shapes that `read` gives the parameters: the file's, as the module stores them."""
    return {p: e.shape[::-1] if names.is_transposed(p) else e.shape for p, e in entries.items()}


def read(
    module: Model,
    entries: Mapping[ParameterPath, TensorEntry],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """Reads the selected tensors one by one; returns the module with real parameters.

    Args:
        dtype: what every parameter becomes but offsets, which are int32; None keeps the file's.
        mesh: divides parameters as `names.sharding_for` says; None puts them on the default device.

    Raises:
        ConfigError: the mesh does not divide a parameter evenly.
    """
    shardings = _shardings(entries, mesh)  # all of them before the first byte is read
    values = {
        path: place_index(entry, shardings[path])
        if names.is_index(path)
        else place(entry, names.is_transposed(path), dtype, shardings[path])
        for path, entry in entries.items()
    }
    return filled(module, values)


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder: give a checkpoint folder in Hugging Face layout"
    others = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".gguf")]
    hint = f"; it has {', '.join(others)}, which are not read" if others else ""
    return f"{folder} has neither {SINGLE} nor {INDEX}{hint}: give a folder of safetensors files"


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        weight_map = raw["weight_map"]
        valid = bool(weight_map) and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index: it needs an object 'weight_map'") from error
    if not valid:
        raise CheckpointError(f"{path} is no index: 'weight_map' must map tensors to file names")
    outside = sorted({file for file in weight_map.values() if Path(file).name != file})
    refuse(path, [f"shard {file!r} is not a file name in this folder" for file in outside])
    return weight_map


def _indexed(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorEntry]:
    findings, headers = [], {}
    for file in dict.fromkeys(weight_map.values()):
        named = [name for name, owner in weight_map.items() if owner == file]
        if not (folder / file).is_file():
            findings.append(
                f"shard {file} is missing; {INDEX} places {len(named)} tensors in it, {named[0]} "
                "first: download it again"
            )
            continue
        try:
            headers[file] = read_header(folder / file)
        except CheckpointError as error:
            findings.append(f"shard {file}: {error}; tensor {named[0]} is in it")
    findings += _index_differences(weight_map, headers)
    refuse(folder, findings)
    return {name: headers[file][name] for name, file in weight_map.items()}


def _index_differences(
    weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorEntry]]
) -> Iterator[str]:
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            yield f"tensor {name} is in {INDEX} under {file}, but not in that file"
    for file, header in headers.items():
        for name in header:
            if name not in weight_map:
                yield f"tensor {name} is in {file} but not in {INDEX}"
            elif weight_map[name] != file:
                yield f"tensor {name} is in {file}, but {INDEX} places it in {weight_map[name]}"


def _notice_strays(checkpoint: Checkpoint) -> None:
    folder, used = checkpoint.folder, {entry.file.name for entry in checkpoint.tensors.values()}
    strays = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in used)
    if strays:
        logger.warning(
            "%s: ignored %s, which %s not part of the checkpoint (%s)",
            folder,
            ", ".join(strays),
            "is" if len(strays) == 1 else "are",
            f"not named by {INDEX}" if checkpoint.source == INDEX else f"only {SINGLE} is read",
        )


def _found(
    checkpoint: Checkpoint, wanted: Mapping[ParameterPath, tuple[int, ...]], kind: Kind
) -> tuple[dict[ParameterPath, TensorEntry], list[str]]:
    """Tensors by parameter path, and what their names and dtypes alone rule out."""
    found: dict[ParameterPath, TensorEntry] = {}
    findings: list[str] = []
    for name, entry in checkpoint.tensors.items():
        path, where = names.parameter_path(name), f"tensor {name} in {entry.file.name}"
        if names.is_ignored(name) or _says_nothing(path, entry, wanted):
            continue
        if reason := names.unsupported(name, kind):
            findings.append(f"{where}: {reason}")
        elif path in found:
            findings.append(f"{where} is there a second time as {found[path].name}")
        else:
            found[path] = entry
            dtypes = INDEX_DTYPES if names.is_index(path) else DTYPES
            if path in wanted and (problem := dtype_problem(entry, dtypes)):
                findings.append(f"{where}: {problem}")
    return found, findings


def _says_nothing(
    path: ParameterPath, entry: TensorEntry, wanted: Mapping[ParameterPath, tuple[int, ...]]
) -> bool:
    """Offsets of 0 where the draft vocabulary is the whole one."""
    return names.is_index(path) and path not in wanted and not entry.open_index().any()


def _drop_tied_head(found: dict[ParameterPath, TensorEntry]) -> list[str]:
    """Takes a head that repeats the embedding out of `found`; the model has one array for both."""
    head = found.pop(_HEAD, None)
    embedding = found.get(("embed_tokens", "weight"))
    if head is None or embedding is None:
        return []
    if not _same_values(head, embedding):
        return [
            f"tensor {head.name} in {head.file.name} differs from {embedding.name}, though the "
            "config has tie_word_embeddings=true: set it to false in config.json to use this head, "
            "or remove the tensor"
        ]
    logger.warning(
        "%s: ignored %s, an equal copy of %s (the config ties them)",
        head.file,
        head.name,
        embedding.name,
    )
    return []


def _same_values(a: TensorEntry, b: TensorEntry) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or dtype_problem(a):
        return False
    left, right = a.open().reshape(-1).view(np.uint8), b.open().reshape(-1).view(np.uint8)
    return all(
        np.array_equal(left[i : i + _COMPARED_BYTES], right[i : i + _COMPARED_BYTES])
        for i in range(0, a.nbytes, _COMPARED_BYTES)
    )


def _shardings(
    entries: Mapping[ParameterPath, TensorEntry], mesh: Mesh | None
) -> dict[ParameterPath, NamedSharding | None]:
    if mesh is None:
        return dict.fromkeys(entries)
    shapes = stored_shapes(entries)
    return {path: names.sharding_for(path, shape, mesh) for path, shape in shapes.items()}
