"""The `speculators` layout of a drafter's `config.json`, as vLLM's tools publish it.

Read into the keys of the z-lab layout, which `drafter.py` parses, and written from a
`DrafterConfig`. Two conventions differ and are turned here and nowhere else: a tapped block has its
0-based id plus one, and a drafter brings its own embedding and head.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_jax.config.geometry import LAYER_TYPES
from dflash_jax.config.reading import require
from dflash_jax.errors import ConfigError

if TYPE_CHECKING:
    from dflash_jax.config.drafter import DrafterConfig

# The release whose keys are written.
SPECULATORS_VERSION = "0.5.0"
# Every config of that release carries these of a Domino head, whether there is one or not.
_DOMINO_KEYS = ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "shift_label")
# What is not a setting of the drafter itself, or is turned below.
_OWN_KEYS = (
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "sliding_window_non_causal",
    "speculators_config",
    "architectures",
    *_DOMINO_KEYS,
)


class Verifier(NamedTuple):
    """The target that a drafter was made for, as this layout names it."""

    name_or_path: str = ""
    architectures: tuple[str, ...] = ()


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a raw config says that it is in this layout."""
    return raw.get("speculators_model_type") is not None


def from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under the keys of the z-lab layout.

    Raises:
        ConfigError: another speculator than DFlash, or a key that must be there is not.
    """
    kind, projector = raw["speculators_model_type"], raw.get("projector_type")
    if kind != "dflash" or projector not in (None, "dflash"):
        named = kind if kind != "dflash" else f"{kind} with projector_type={projector!r}"
        raise ConfigError(
            f"speculators_model_type {named} is not supported: use a DFlash v1 drafter ('dflash')"
        )
    layer = require(raw, "transformer_layer_config", "drafter")
    own = {k: v for k, v in raw.items() if k not in _OWN_KEYS and v is not None}
    # Sliding layers are causal within a block unless the config says otherwise.
    causal = {"is_causal": False} if raw.get("sliding_window_non_causal") else {}
    require(raw, "draft_vocab_size", "drafter")
    return {
        "has_embed_tokens": True,
        "has_lm_head": True,
        **layer,
        **causal,
        **own,
        "target_layer_ids": _block_ids(require(raw, "aux_hidden_state_layer_ids", "drafter")),
    }


def to_speculators(
    config: "DrafterConfig", verifier: Verifier, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The `config.json` of a drafter that has its own embedding and head.

    Raises:
        ConfigError: a mask within blocks that this layout has no key for.
    """
    windows = tuple(map(bool, config.windows))
    if config.causal not in (windows, (False,) * len(windows)):
        raise ConfigError(
            f"is_causal={config.causal[0]} with layers {config.windows}: the speculators layout "
            "has full layers that are never causal within a block; use the z-lab layout"
        )
    narrower = config.target_hidden_size != config.hidden_size
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": _proposals(config, verifier),
        "transformer_layer_config": _layer_config(config, dtype),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.target_hidden_size if narrower else None,
        "sliding_window_non_causal": any(windows) and not any(config.causal),
        "sample_from_anchor": config.predicts_from_anchor,
        # Not of this layout, but without it the way back would lose the target's depth.
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _block_ids(ids: list[int]) -> list[int]:
    """0-based ids of the tapped blocks; an id here counts the embedding's output as 0."""
    if min(ids, default=1) < 1:
        raise ConfigError(
            f"aux_hidden_state_layer_ids {list(ids)}: 0 is the embedding's output, which is no "
            "block; ids of 1 (the first block's output) and more are supported"
        )
    return [int(index) - 1 for index in ids]


def _proposals(config: "DrafterConfig", verifier: Verifier) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": config.trained_draft_len,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {
            "name_or_path": verifier.name_or_path,
            "architectures": list(verifier.architectures),
        },
    }


def _layer_config(config: "DrafterConfig", dtype: str) -> dict[str, Any]:
    """The nested config of one layer's kind, with its rotary numbers in the newer form."""
    window = next((w for w in config.windows if w), None)
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": config.rope.to_dict(),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": [LAYER_TYPES[bool(w)] for w in config.windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
    }
