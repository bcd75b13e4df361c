"""Reading one GGUF file: its metadata by key, its tensors by name, dequantised.

A thin layer over the `gguf` package, which is imported only when a file is opened, so that the core
imports without it. Nothing here knows what a key or a tensor means for a model (`gguf.py`).
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dflash_jax.errors import CheckpointError


class GgufFile:
    """One open GGUF: metadata by key, tensors by name. Memory-mapped, so cheap to hold open."""

    def __init__(self, path: str | Path):
        """Raises `CheckpointError` if `path` is not a whole GGUF file."""
        from gguf import GGUFReader

        self.path = Path(path)
        try:
            self._reader = GGUFReader(self.path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{self.path} is not a complete GGUF file ({error}); fetch or place it again"
            ) from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, or `default` where the file does not have it."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The value of a metadata key; `CheckpointError` where the file does not have it."""
        if not self.has(key):
            raise CheckpointError(f"{self.path} has no metadata key {key}, which is needed")
        return self.get(key)

    def shape(self, name: str) -> tuple[int, ...]:
        """Axes outermost first, as Hugging Face has them; GGUF lists them innermost first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str) -> Float[np.ndarray, "..."]:
        """One tensor, dequantised to float32."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise; use a file quantised to Q8_0, Q4_1 or F16"
            ) from error
        return np.ascontiguousarray(values, np.float32).reshape(self.shape(name))
