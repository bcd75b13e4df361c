"""`TargetConfig`: a target's `config.json`, parsed into a frozen record."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.config.geometry import common_fields
from dflash_jax.config.reading import read_config, token_ids
from dflash_jax.config.rope import RopeConfig
from dflash_jax.errors import ConfigError

TARGET_TYPES = ("llama", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The target's architecture, as its `config.json` gives it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "TargetConfig":
        """Parses a Hugging Face `config.json` of a Llama, Qwen2 or Qwen3 model.

        Raises:
            ConfigError: an unknown `model_type`, layer type or rope type, or a missing number.
        """
        kind = raw.get("model_type")
        if kind not in TARGET_TYPES:
            raise ConfigError(
                f"target model_type {kind!r} is not supported; supported: {', '.join(TARGET_TYPES)}"
            )
        bias = bool(raw.get("attention_bias", False))
        return cls(
            model_type=kind,
            **common_fields(raw, "target"),
            # Absent means tied for none of the three in current releases.
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=True if kind == "qwen2" else bias,
            o_bias=False if kind == "qwen2" else bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if kind == "llama" else False,
            qk_norm=kind == "qwen3",
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "TargetConfig":
        """Parses `config.json`; end ids are united with those of `generation_config.json`."""
        config = cls.from_dict(read_config(folder))
        generation = Path(folder) / "generation_config.json"
        if not generation.is_file():
            return config
        more = token_ids(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
        united = tuple(dict.fromkeys(config.eos_token_ids + more))
        return dataclasses.replace(config, eos_token_ids=united)

    def with_rope_scaling(self, scaling: Mapping[str, Any]) -> "TargetConfig":
        """The same target under another rope scaling, positions multiplied by its factor."""
        raw = {
            "rope_scaling": {"rope_theta": self.rope.theta, **scaling},
            "original_max_position_embeddings": self.max_position_embeddings,
        }
        rope = RopeConfig.from_dict(raw, "rope_scaling override of the target")
        positions = int(self.max_position_embeddings * (rope.factor or 1.0))
        return dataclasses.replace(self, rope=rope, max_position_embeddings=positions)
