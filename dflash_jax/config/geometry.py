"""What targets and drafters have in common: sizes, heads, layer types and their windows."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.config.reading import positive, require
from dflash_jax.config.rope import RopeConfig
from dflash_jax.errors import ConfigError

LAYER_TYPES = ("full_attention", "sliding_attention")


def windows_of(raw: Mapping[str, Any], num_layers: int, what: str) -> tuple[int | None, ...]:
    """One window (None = full attention) a layer; a window counts the query's own position."""
    types = raw.get("layer_types")
    enabled = raw.get("use_sliding_window", types is not None)
    if types is None:
        first = raw.get("max_window_layers", 0) if enabled else num_layers
        types = [LAYER_TYPES[index >= first] for index in range(num_layers)]
    if len(types) != num_layers:
        raise ConfigError(f"the {what} config has {len(types)} layer_types for {num_layers} layers")
    for index, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"{what} layer {index} has type {kind!r}, which cannot be rolled back or is not "
                f"known; supported: {', '.join(LAYER_TYPES)}"
            )
    if not enabled or LAYER_TYPES[1] not in types:
        return (None,) * num_layers
    window = positive(raw, "sliding_window", what)
    return tuple(window if kind == LAYER_TYPES[1] else None for kind in types)


def _heads(raw: Mapping[str, Any], what: str) -> dict[str, int]:
    hidden, heads = positive(raw, "hidden_size", what), positive(raw, "num_attention_heads", what)
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(
            f"the {what} config has {heads} query heads, not a multiple of {kv_heads} KV heads"
        )
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(
                f"the {what} config has no head_dim and hidden_size {hidden} is not a multiple of "
                f"{heads} heads: add head_dim to config.json"
            )
        head_dim = hidden // heads
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def common_fields(raw: Mapping[str, Any], what: str) -> dict[str, Any]:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"the {what} config has hidden_act={raw['hidden_act']!r}: only 'silu'")
    num_layers = positive(raw, "num_hidden_layers", what)
    return _heads(raw, what) | {
        "vocab_size": positive(raw, "vocab_size", what),
        "intermediate_size": positive(raw, "intermediate_size", what),
        "num_hidden_layers": num_layers,
        "rms_norm_eps": float(require(raw, "rms_norm_eps", what)),
        "max_position_embeddings": positive(raw, "max_position_embeddings", what),
        "rope": RopeConfig.from_dict(raw, what),
        "windows": windows_of(raw, num_layers, what),
    }
