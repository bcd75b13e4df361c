"""Loading a folder for comparison with what other code wrote into it (`weight_files.py`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.typing import DTypeLike

from dflash_jax.errors import CheckpointError
from dflash_jax.weights.load import abstract_drafter, abstract_target
from dflash_jax.weights.match import parameters
from dflash_jax.weights.names import Kind
from dflash_jax.weights.safetensors import load_parameters
from weight_files import Tensors


def load(folder: Path, kind: Kind = "target", dtype: DTypeLike | None = None) -> Tensors:
    """Published name → parameter in the file's layout, by a rule of names written out here."""
    module: Any = abstract_target(folder) if kind == "target" else abstract_drafter(folder)
    found = {}
    for path, array in parameters(load_parameters(module, folder, kind=kind, dtype=dtype)).items():
        name = ".".join(str(part) for part in path)
        projection = name.endswith("_proj.weight") or name == "fc.weight"
        prefix = "model." if kind == "target" and name != "lm_head.weight" else ""
        found[prefix + name] = np.asarray(array).T if projection else np.asarray(array)
    return found


def assert_same(loaded: Tensors, expected: Mapping[str, np.ndarray]) -> None:
    """The same names, dtypes and values."""
    assert set(loaded) == set(expected)
    for name, values in expected.items():
        assert loaded[name].dtype == values.dtype, name
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)


def message_of(folder: Path, kind: Kind = "target") -> str:
    """What a folder is refused with; the folder is always named."""
    with pytest.raises(CheckpointError) as refused:
        load(folder, kind)
    assert str(folder) in str(refused.value)
    return str(refused.value)
