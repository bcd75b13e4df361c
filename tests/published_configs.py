"""`config.json` contents in the published layouts, and how tests parse variants of them."""

from typing import Any

import dflash_jax as dj

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
QWEN3: dict[str, Any] = {
    **QWEN2,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# Qwen3-8B-DFlash-b16, as published.
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 5,
}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The same dictionary without some keys."""
    return {key: value for key, value in raw.items() if key not in keys}


def target(raw: dict[str, Any], **changes: Any) -> dj.TargetConfig:
    return dj.TargetConfig.from_dict({**raw, **changes})


def drafter(raw: dict[str, Any] = DRAFTER, **changes: Any) -> dj.DrafterConfig:
    return dj.DrafterConfig.from_dict({**raw, **changes})


def with_dflash(**changes: Any) -> dict[str, Any]:
    """The published config with changes under `dflash_config`; None takes a key out."""
    nested = {**DRAFTER["dflash_config"], **changes}
    return {**DRAFTER, "dflash_config": {k: v for k, v in nested.items() if v is not None}}
