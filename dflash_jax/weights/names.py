"""Published tensor names, the parameter paths they stand for, and what each parameter is.

A path is the attribute path in the Flax module (`models/`): ("layers", 0, "mlp", "up_proj",
"weight"). Three things follow from a path alone and are decided here and nowhere else: whether the
file holds the transpose, which logical axes the parameter has, and how a mesh divides it. Nothing
here opens a file.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import ConfigError

Kind = Literal["target", "drafter"]
ParameterPath = tuple[str | int, ...]

# Logical axes of a parameter as the module stores it ([in, out], not the file's [out, in]), in the
# letters of the design: e model width, h query heads, k key/value heads, f MLP width, v vocabulary
# rows, a tapped layers' widths. A bias has the last axis of its weight.
LOGICAL_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed_tokens": ("v", "e"),
        "lm_head": ("v", "e"),
        "q_proj": ("e", "h"),
        "k_proj": ("e", "k"),
        "v_proj": ("e", "k"),
        "o_proj": ("h", "e"),
        "gate_proj": ("e", "f"),
        "up_proj": ("e", "f"),
        "down_proj": ("f", "e"),
        "fc": ("a", "e"),
    }
)
# The rule: tensor parallelism divides heads, MLP width and vocabulary; e and a stay whole, so that
# norms are local and one reduction follows each of o_proj and down_proj. Norms are replicated.
MESH_AXES: Mapping[str, str] = MappingProxyType(
    {"h": "tensor", "k": "tensor", "f": "tensor", "v": "tensor"}
)
_AXIS_NAMES = MappingProxyType(
    {"h": "query heads", "k": "key/value heads", "f": "MLP width", "v": "vocabulary rows"}
)

_PREFIX = "model."
_OUTSIDE_PREFIX = ("lm_head",)
# Derived at run time: frequencies from the config (old exports stored them), and the flags of a
# reduced draft vocabulary from its offsets.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
DRAFT_FLAGS = "t2d"
# Offsets of a reduced draft vocabulary: whole numbers, whatever the dtype of the weights.
DRAFT_OFFSETS: ParameterPath = ("d2t",)

_BOTH: tuple[Kind, ...] = ("target", "drafter")
_DRAFTER: tuple[Kind, ...] = ("drafter",)
_UNSUPPORTED: Sequence[tuple[str, tuple[Kind, ...], str]] = (
    (r"(^|\.)markov_head\.", _DRAFTER, "a DSpark Markov head is not supported"),
    (r"(^|\.)confidence_head\.", _DRAFTER, "a confidence head is not supported"),
    (r"(^|\.)candidate_selector\.", _DRAFTER, "a DFlash 2 candidate selector is not supported"),
    (r"_conv\.", _DRAFTER, "DFlash 2 convolutions are not supported"),
    (
        r"\.qkv_proj\.",
        _BOTH,
        "a fused qkv_proj is not supported: split it into q_proj, k_proj and v_proj",
    ),
    (
        r"\.(weight_scale\w*|input_scale|qweight|qzeros|scales|g_idx)$",
        _BOTH,
        "quantised weights are not supported: use the bf16, f16 or f32 release",
    ),
)


def parameter_path(name: str) -> ParameterPath:
    """The parameter path of a published tensor name, with or without the `model.` prefix.

    `model.layers.3.self_attn.q_proj.weight` → ("layers", 3, "self_attn", "q_proj", "weight")
    """
    parts = name.removeprefix(_PREFIX).split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def dotted(path: ParameterPath) -> str:
    """The path as one string, which is the published name without a prefix."""
    return ".".join(map(str, path))


def tensor_name(path: ParameterPath, kind: Kind) -> str:
    """The published name of a parameter: the inverse of `parameter_path`.

    Targets carry `model.` on everything but the head, drafters carry no prefix.
    """
    bare = kind == "drafter" or path[0] in _OUTSIDE_PREFIX
    return dotted(path) if bare else _PREFIX + dotted(path)


def is_transposed(path: ParameterPath) -> bool:
    """Whether the file holds [out, in] where the module stores [in, out]."""
    owner = _owner(path)
    return path[-1] == "weight" and (owner.endswith("_proj") or owner == "fc")


def is_ignored(name: str) -> bool:
    """Whether a tensor may be in a file though no parameter reads it."""
    return name.endswith(_IGNORED_SUFFIX) or name == DRAFT_FLAGS


def is_index(path: ParameterPath) -> bool:
    """Whether a parameter holds whole numbers (int32 here, int64 in files) and is never cast."""
    return path == DRAFT_OFFSETS


def is_vocabulary(path: ParameterPath) -> bool:
    """Whether axis 0 counts vocabulary rows, of which a file may hold more than the config says."""
    return logical_axes(path)[:1] == ("v",)


def unsupported(name: str, kind: Kind) -> str | None:
    """Why a tensor of this name cannot be loaded, or None if the name itself says nothing."""
    bare = name.removeprefix(_PREFIX)
    for pattern, kinds, reason in _UNSUPPORTED:
        if kind in kinds and re.search(pattern, bare):
            return reason
    return None


def logical_axes(path: ParameterPath) -> tuple[str, ...]:
    """Logical axes of a parameter as stored; a norm's weight has none that a rule divides."""
    axes = LOGICAL_AXES.get(_owner(path), ("e",))
    return axes[-1:] if path[-1] == "bias" else axes


def sharding_for(
    path: ParameterPath, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """How a mesh divides a parameter of this (stored) shape.

    A mesh without the axis "tensor" replicates everything.

    Raises:
        ConfigError: the axis to divide is no multiple of the mesh axis.
    """
    spec = []
    for axis, size in zip(logical_axes(path), shape, strict=True):
        mesh_axis = MESH_AXES.get(axis)
        mesh_axis = mesh_axis if mesh_axis in mesh.shape else None
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ConfigError(
                f"{dotted(path)} has {size} on axis {axis} ({_AXIS_NAMES[axis]}), which the "
                f"{mesh.shape[mesh_axis]} devices of mesh axis {mesh_axis!r} do not divide evenly: "
                "use a mesh whose axis divides it"
            )
        spec.append(mesh_axis)
    return NamedSharding(mesh, PartitionSpec(*spec))


def check_mesh(config: TargetConfig | DrafterConfig, kind: Kind, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a mesh that would cut through a head or leave unequal parts.

    Raises:
        ConfigError: with every size that the mesh axis does not divide.
    """
    sizes = {
        "h": ("num_attention_heads", config.num_attention_heads),
        "k": ("num_key_value_heads", config.num_key_value_heads),
        "f": ("intermediate_size", config.intermediate_size),
    }
    findings = [
        f"{key}={size} over the {mesh.shape[MESH_AXES[axis]]} devices of mesh axis "
        f"{MESH_AXES[axis]!r}"
        for axis, (key, size) in sizes.items()
        if MESH_AXES[axis] in mesh.shape and size % mesh.shape[MESH_AXES[axis]]
    ]
    if findings:
        raise ConfigError(
            f"the {kind} cannot be divided evenly: {'; '.join(findings)}: use a mesh whose axis "
            "divides each of them"
        )


def _owner(path: ParameterPath) -> str:
    return str(path[-2]) if len(path) > 1 else ""
