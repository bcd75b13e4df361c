"""`RopeConfig`: rotary embeddings of both published layouts, old and new."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.config.reading import require
from dflash_jax.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, scaling rule and its numbers (None where the rule has none)."""

    theta: float
    kind: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], what: str) -> "RopeConfig":
        """Reads `rope_theta` + `rope_scaling` or the newer `rope_parameters`.

        Raises:
            ConfigError: no theta in either place, an unknown rope type, or a missing number.
        """
        scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in scaling.values()):
            scaling = _single_rope(scaling, what)
        theta = scaling.get("rope_theta", raw.get("rope_theta"))
        if theta is None:
            raise ConfigError(
                f"the {what} config has 'rope_theta' neither at top level nor in 'rope_parameters'"
            )
        partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"the {what} config has partial_rotary_factor={partial}: only 1.0")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        original = raw.get("original_max_position_embeddings")
        return cls._checked(
            float(theta), kind, {"original_max_position_embeddings": original} | scaling, what
        )

    @classmethod
    def _checked(cls, theta: float, kind: str, scaling: dict[str, Any], what: str) -> "RopeConfig":
        needs = {
            "default": (),
            "linear": ("factor",),
            "llama3": (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ),
            "yarn": ("factor", "original_max_position_embeddings"),
        }
        if kind not in needs:
            raise ConfigError(
                f"the {what} config has rope type {kind!r}; supported: {', '.join(ROPE_TYPES)}"
            )
        values = {key: require(scaling, key, f"{what} rope") for key in needs[kind]}
        if kind == "yarn":
            # The paper's betas; a checkpoint that was trained with others names them.
            values["beta_fast"] = scaling.get("beta_fast") or 32.0
            values["beta_slow"] = scaling.get("beta_slow") or 1.0
            values["attention_factor"] = scaling.get("attention_factor")
        return cls(theta=theta, kind=kind, **values)

    def to_dict(self) -> dict[str, Any]:
        """The newer `rope_parameters` form, without absent numbers."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return {"rope_theta": values.pop("theta"), "rope_type": values.pop("kind"), **values}


def _single_rope(per_type: Mapping[str, Any], what: str) -> dict[str, Any]:
    entries = [value for value in per_type.values() if isinstance(value, Mapping)]
    if any(dict(entry) != dict(entries[0]) for entry in entries):
        raise ConfigError(
            f"the {what} config has rope parameters that differ by layer type "
            f"({', '.join(per_type)}): one rotary configuration for all layers is supported"
        )
    return dict(entries[0])
