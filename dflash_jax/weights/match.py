"""What a module needs against what a checkpoint has: every difference in one error.

Shapes here are those of the file (or of the Orbax record), so that a message shows the numbers that
a user can look up. Nothing here reads a tensor; `safetensors.py` and `orbax.py` do, after `compare`
has found nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from dflash_jax.errors import CheckpointError
from dflash_jax.weights import names
from dflash_jax.weights.names import ParameterPath

Model = TypeVar("Model", bound=nnx.Module)

_SHOWN = 10
# A drafter's own tables and vocabulary are never left aside for the target's.
_HINTS: Mapping[ParameterPath, str] = {
    names.DRAFT_OFFSETS: "; set draft_vocab_size to the length of d2t, in dflash_config",
    ("lm_head", "weight"): "; set has_lm_head=true in a drafter's dflash_config",
    ("embed_tokens", "weight"): "; set has_embed_tokens=true in a drafter's dflash_config",
}


class Stored(NamedTuple):
    """One tensor that a checkpoint has: its name there, the file, the shape there."""

    name: str
    where: str
    shape: tuple[int, ...]


def parameters(module: nnx.Module) -> dict[ParameterPath, jax.Array]:
    """Every parameter of a real module by path."""
    return leaves(module)


def leaves(module: nnx.Module) -> dict[ParameterPath, Any]:
    """The same of any module: arrays, or shapes where it is abstract."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {_path(keys): leaf.get_value() for keys, leaf in flat}


def wanted_shapes(module: nnx.Module) -> dict[ParameterPath, tuple[int, ...]]:
    """Path and shape of every parameter of an abstract (or real) module."""
    return {path: tuple(value.shape) for path, value in leaves(module).items()}


def filled(
    module: Model, values: Mapping[ParameterPath, jax.Array | jax.ShapeDtypeStruct]
) -> Model:
    """The module with its abstract parameters replaced; no array is made or copied."""
    graph, state = nnx.split(module)
    flat = [(keys, leaf.replace(values[_path(keys)])) for keys, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def refuse(place: Path, findings: Sequence[str]) -> None:
    """Raises one `CheckpointError` with the first ten findings and the count; none: returns."""
    if not findings:
        return
    shown = "".join(f"\n  - {finding}" for finding in findings[:_SHOWN])
    rest = len(findings) - _SHOWN
    more = f"\n  ... and {rest} more" if rest > 0 else ""
    count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    raise CheckpointError(f"{place}: {count}:{shown}{more}")


def compare(
    wanted: Mapping[ParameterPath, tuple[int, ...]],
    found: Mapping[ParameterPath, Stored],
    where: str,
) -> list[str]:
    """Tensors that are missing, unexpected or of another shape; `where` says what was searched.

    Axis 0 of embedding and head may have more rows than the config's vocabulary: padding.
    """
    findings = []
    for path, shape in wanted.items():
        if path not in found:
            findings.append(_missing(path, shape, where))
        elif not _fits(path, shape, found[path].shape):
            findings.append(_wrong_shape(path, shape, found[path]))
    findings += [
        f"tensor {stored.name} in {stored.where} is unexpected: the config has no such parameter"
        + _HINTS.get(path, "")
        for path, stored in found.items()
        if path not in wanted
    ]
    return findings


def _path(keys: Iterable[Any]) -> ParameterPath:
    return tuple(keys)


def _fits(path: ParameterPath, want: Sequence[int], got: Sequence[int]) -> bool:
    if names.is_vocabulary(path) and len(got) == len(want) == 2:
        return got[0] >= want[0] and got[1] == want[1]
    return tuple(got) == tuple(want)


def _missing(path: ParameterPath, shape: Iterable[int], where: str) -> str:
    name = names.dotted(path)
    if path[0] == "lm_head":
        return (
            f"tensor {name} is missing from {where} though the config has tie_word_embeddings="
            "false: set it to true in config.json if the head is the embedding"
        )
    return f"tensor {name} of shape {list(shape)} is missing from {where}"


def _wrong_shape(path: ParameterPath, want: Sequence[int], stored: Stored) -> str:
    at_least = " (or more rows)" if names.is_vocabulary(path) else ""
    return (
        f"tensor {stored.name} in {stored.where} has shape {list(stored.shape)}, the config asks "
        f"for {list(want)}{at_least}"
    )
