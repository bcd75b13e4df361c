"""`DrafterConfig`: a drafter's `config.json` in every published layout, or refused by name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.config.geometry import LAYER_TYPES, common_fields
from dflash_jax.config.reading import positive, read_config
from dflash_jax.config.rope import RopeConfig
from dflash_jax.config.speculators import from_speculators, is_speculators
from dflash_jax.errors import ConfigError

# Drafter features that change the arithmetic and that this build has no code for.
UNSUPPORTED_DRAFTER_KEYS = {
    "conv_kernel_size": "DFlash 2 convolutions",
    "selector_rank": "the DFlash 2 candidate selector",
    "markov_rank": "a DSpark Markov head",
    "gru_hidden_dim": "a Domino head",
    "use_swa": "symmetric sliding windows (use_swa)",
    "attention_sink_bias": "attention sinks",
    "final_logit_softcapping": "logit soft-capping",
    "output_multiplier": "an output multiplier",
    "input_embedding_scale": "an input embedding scale",
}


def layer_ids_by_rule(depth: int, count: int) -> tuple[int, ...]:
    """Evenly spread tapped block ids, first 1 and last `depth - 3`.

    The rule of the published checkpoints: round(1 + i (depth - 4) / (count - 1)), ties to even;
    one id is `depth // 2`. A rule for *new* drafters: a checkpoint must name what it was trained
    with.
    """
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter's architecture and what it was trained with.

    `block_size` counts the slots of a trained block. `predicts_from_anchor` says which convention
    holds: False: slot 0 is the given anchor and slots 1 … give drafts (block_size - 1 of them);
    True: every slot predicts the token after it (block_size drafts).

    `draft_vocab_size` is how many of the target's ids a drafter can propose; None: all of them.
    Which ones, the tensor `d2t` says. `has_embed_tokens` and `has_lm_head` say whether the weights
    bring an embedding and a head; else they are the target's (of a head the rows that `d2t` names).
    """

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
    causal: tuple[bool, ...]
    attention_bias: bool
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int | None
    target_hidden_size: int
    predicts_from_anchor: bool
    draft_vocab_size: int | None = None
    has_embed_tokens: bool = False
    has_lm_head: bool = False

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DrafterConfig":
        """Parses a DFlash `config.json` of either published layout, z-lab or speculators.

        In the z-lab layout `dflash_config` is read first, then the top level.

        Raises:
            ConfigError: a key that must be there is absent from both places, or a feature that
                this build does not support is asked for.
        """
        if is_speculators(raw):
            raw = from_speculators(raw)
        nested = raw.get("dflash_config") or {}
        both = {**raw, **{k: v for k, v in nested.items() if v is not None}}
        _refuse_unsupported(both)
        common = common_fields(both, "drafter")
        if both.get("target_layer_ids") is None:
            raise ConfigError(_missing_layer_ids(both, common["num_hidden_layers"]))
        causal = both.get("is_causal")
        return cls(
            **common,
            causal=tuple(bool(w) if causal is None else bool(causal) for w in common["windows"]),
            attention_bias=bool(both.get("attention_bias", False)),
            block_size=positive(both, "block_size", "drafter"),
            target_layer_ids=_layer_ids(both),
            mask_token_id=_mask_id(both, common["vocab_size"]),
            num_target_layers=both.get("num_target_layers"),
            target_hidden_size=both.get("target_hidden_size") or common["hidden_size"],
            predicts_from_anchor=bool(both.get("sample_from_anchor", both.get("shift_label"))),
            draft_vocab_size=_draft_vocab_size(both, common["vocab_size"]),
            has_embed_tokens=bool(both.get("has_embed_tokens", False)),
            has_lm_head=bool(both.get("has_lm_head", False)),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "DrafterConfig":
        """Parses the `config.json` of a drafter's folder."""
        return cls.from_dict(read_config(folder))

    @property
    def trained_draft_len(self) -> int:
        """Draft tokens of a trained block: block_size - 1, or all when the anchor slot predicts."""
        return self.block_size if self.predicts_from_anchor else self.block_size - 1

    def block_width(self, max_draft_len: int) -> int:
        """Slots W of a block that gives K = `max_draft_len` drafts: K + 1, or K (see class)."""
        return max_draft_len if self.predicts_from_anchor else max_draft_len + 1

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The published z-lab layout (`model_type` names the drafter's own block type)."""
        window = next((w for w in self.windows if w), None)
        rope = self.rope.to_dict()
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        extra = {"sample_from_anchor": True} if self.predicts_from_anchor else {}
        extra |= (
            {} if self.causal == tuple(map(bool, self.windows)) else {"is_causal": self.causal[0]}
        )
        # Ours: the published layout has no vocabulary, embedding or head of the drafter's own.
        extra |= {
            name: value
            for name in ("draft_vocab_size", "has_embed_tokens", "has_lm_head")
            if (value := getattr(self, name))
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **extra,
            },
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": [LAYER_TYPES[bool(w)] for w in self.windows],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": dtype,
        }


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    found = [
        f"{key} ({meaning})"
        for key, meaning in UNSUPPORTED_DRAFTER_KEYS.items()
        if raw.get(key) not in (None, 0, False) and not _neutral(raw, key)
    ]
    if found:
        raise ConfigError(
            f"the drafter config asks for {', '.join(found)}, which this build does not support: "
            "use a DFlash v1 drafter"
        )


def _neutral(raw: Mapping[str, Any], key: str) -> bool:
    """Values that leave the arithmetic of DFlash v1 as it is."""
    return key in ("output_multiplier", "input_embedding_scale") and raw[key] == 1.0


def _missing_layer_ids(raw: Mapping[str, Any], num_layers: int) -> str:
    depth = raw.get("num_target_layers")
    hint = ""
    if isinstance(depth, int) and depth > 4:
        guess = list(layer_ids_by_rule(depth, num_layers))
        hint = f"; {num_layers} layers spread evenly over {depth} would be {guess}"
    return (
        "the drafter config has no 'target_layer_ids' in dflash_config or at top level: they are a "
        f"choice of training and are not guessed; add them to config.json{hint}"
    )


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    ids = tuple(int(i) for i in raw["target_layer_ids"])
    depth = raw.get("num_target_layers")
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        raise ConfigError(f"target_layer_ids {list(ids)}: distinct block ids >= 0 are needed")
    if depth is not None and max(ids) >= depth:
        raise ConfigError(
            f"target_layer_ids {list(ids)} name block {max(ids)} of a target with "
            f"num_target_layers={depth}: ids run from 0 to {depth - 1}"
        )
    return ids


def _draft_vocab_size(raw: Mapping[str, Any], vocab_size: int) -> int | None:
    """None where the draft vocabulary is the whole one."""
    size = raw.get("draft_vocab_size")
    if size in (None, 0, vocab_size):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < vocab_size:
        raise ConfigError(
            f"draft_vocab_size={size!r}: a whole number from 1 to the vocabulary's {vocab_size} is "
            "needed"
        )
    return size


def _mask_id(raw: Mapping[str, Any], vocab_size: int) -> int:
    mask = raw.get("mask_token_id")
    if mask is None:
        raise ConfigError(
            "the drafter config has no 'mask_token_id' in dflash_config or at top level: it is the "
            "id the drafter was trained with and has no default"
        )
    if not 0 <= mask < vocab_size:
        raise ConfigError(
            f"mask_token_id {mask} is outside the vocabulary of {vocab_size} rows (0 to "
            f"{vocab_size - 1})"
        )
    return int(mask)
