"""Checkpoint folders for tests of `weights/`, written byte by byte or with the safetensors library.

Nothing here uses the package under test: what it reads is written by other code.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "data" / "golden"
PAIRS = ("qwen3-tiny", "llama-tiny")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Tensors = dict[str, np.ndarray]


def golden_config(pair: str, part: str) -> dict[str, Any]:
    """The raw config of a golden target or drafter."""
    return json.loads((GOLDEN / pair / part / "config.json").read_text())


def golden_tensors(pair: str, part: str) -> Tensors:
    """The tensors of a golden target or drafter, as the safetensors library reads them."""
    return load_file(GOLDEN / pair / part / SINGLE)


def write_single(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A folder with one weight file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def write_sharded(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, count: int = 3
) -> Path:
    """A folder with shards (tensors dealt out in turn) and an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in range(count):
        file = shard_name(shard, count)
        part = {name: tensors[name] for name in sorted(tensors)[shard::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def shard_name(shard: int, count: int = 3) -> str:
    """The usual name of a shard, counted from 0."""
    return f"model-{shard + 1:05d}-of-{count:05d}.safetensors"


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name → shard."""
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Writes the index alone."""
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (folder / INDEX).write_text(json.dumps(index))


def write_bytes(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> Path:
    """A safetensors file from (dtype code, shape, bytes), written by hand."""
    header, data = {}, b""
    for name, (code, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        data += content
    return write_header(path, header, data)


def write_header(path: Path, header: Any, data: bytes = b"", pad: bytes = b"") -> Path:
    """A file with any JSON as its header."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def copy_golden(pair: str, part: str, folder: Path) -> Path:
    """A golden folder that a test may damage."""
    shutil.copytree(GOLDEN / pair / part, folder)
    return folder


def run_python(code: str, *args: str, **env: str) -> str:
    """Runs code in a process of its own, warnings as errors; its standard output."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env}
    command = [sys.executable, "-W", "error", "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
