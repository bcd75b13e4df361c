"""The base configuration of the reference's vectors for its validator, and how it is checked.

Batch 8, 8192 tokens a step and a request, K 7, 4 devices, 72 x 10^9 bytes, and a drafter of 5
layers, 16 KV heads of 64 and a million positions. VANILLA is `draft_attention="xla"`, FA4 is
"pallas" and TRTLLM is `context_store="pool"`.
"""

from typing import Any

import dflash_jax as dj
from dflash_jax.planning.context_rules import Findings, context_findings

GIB = 1024**3
SLOT = 41_984_000
"""One row of 8192 + 8 positions, 5 layers, 4 KV heads of 64, 2 bytes."""
PAGED_SLOT = 8224 * 5 * 2 * 4 * 64 * 2
BUDGET = 72 * 10**9

RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "block_size": 8,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3]},
    "vocab_size": 1024,
    "hidden_size": 8192,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1_048_576,
}


def drafter(**changes: Any) -> dj.DrafterConfig:
    """The base drafter with other keys in its config; None leaves one out."""
    raw = {**RAW, **changes}
    return dj.DrafterConfig.from_dict({k: v for k, v in raw.items() if v is not None})


def check(**changes: Any) -> Findings:
    """What the validator finds of the base configuration with these changes."""
    base: dict[str, Any] = {
        "max_batch_size": 8,
        "max_num_tokens": 8192,
        "max_seq_len": 8192,
        "max_draft_len": 7,
        "drafter": drafter(),
        "budget": BUDGET,
        "shards": 4,
    }
    return context_findings(**{**base, **changes})


def error(**changes: Any) -> str:
    """The one refusal."""
    found = check(**changes)
    (only,) = found.errors
    return only


def warning(**changes: Any) -> str:
    """The one warning, and no refusal."""
    errors, warnings = check(**changes)
    (only,) = warnings
    assert errors == []
    return only


SILENT: Findings = Findings([], [])
