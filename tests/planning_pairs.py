"""Pairs for tests of the planner: Qwen3-8B and its drafter by their configs, and fixture T.

Plans are made from records alone; no file is read and no device is asked.
"""

import logging
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.planning.account import Inputs
from dflash_jax.planning.budget import allocation_order
from dflash_jax.planning.device import DeviceMemory
from dflash_jax.planning.footprint import Weights
from dflash_jax.planning.measured import Measured
from dflash_jax.planning.plan import MemoryPlan, make_plan
from dflash_jax.planning.resolve import on_platform, resolve
from tiny import DRAFTER, TARGET

GIB = 1024**3
RESERVE = 6 * GIB

QWEN3_8B_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
QWEN3_8B = dj.TargetConfig.from_dict(QWEN3_8B_CONFIG)
QWEN3_8B_DRAFTER_CONFIG = QWEN3_8B_CONFIG | {
    "num_hidden_layers": 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151_669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
QWEN3_8B_DRAFTER = dj.DrafterConfig.from_dict(QWEN3_8B_DRAFTER_CONFIG)
QWEN3_8B_WEIGHTS = Weights(2 * 8_190_735_360, 2 * 1_048_626_432)
"""Counted by hand: two tables, 36 (5) layers of 192,946,432, and the norms and projection."""

TINY = dj.TargetConfig.from_dict(TARGET)
TINY_DRAFTER = dj.DrafterConfig.from_dict(DRAFTER)
TINY_WEIGHTS = Weights(1000, 500)


def row_state(vocab_size: int, *, context: bool = True) -> int:
    """Bytes of a row's token state, by hand, without the drafter's one limit.

    Anchor, what remains, length, whether it drafts, and the context's length; nine numbers, 300
    biases, 32 ends and two flags; a flag and a count for every id.
    """
    return (17 if context else 13) + (36 + 300 * 8 + 32 * 4 + 2) + 5 * vocab_size


def inputs(
    serve: dj.ServeConfig,
    free: int | DeviceMemory,
    weights: Weights = TINY_WEIGHTS,
    shards: int = 1,
) -> Inputs:
    """What a plan is made from, besides the configuration."""
    memory = free if isinstance(free, DeviceMemory) else DeviceMemory(free, 0, "test")
    order = allocation_order(serve.allocation_order, {})
    return Inputs(serve=serve, weights=weights, memory=memory, shards=shards, order=order)


def resolved(
    serve: dj.ServeConfig,
    target: dj.TargetConfig = TINY,
    drafter: dj.DrafterConfig | None = TINY_DRAFTER,
    platform: str = "cpu",
) -> dj.ResolvedConfig:
    """The configuration, its dtype decided: float32 unless another platform is named."""
    return on_platform(resolve(serve, target, drafter, engine=False), serve, platform)


def tiny_plan(free: int | DeviceMemory, *, shards: int = 1, **options: Any) -> MemoryPlan:
    """Fixture T in float32 against `free` bytes; 4 rows of 64 tokens unless said otherwise."""
    sizes: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4}
    serve = dj.ServeConfig(**(sizes | options))
    return make_plan(resolved(serve), inputs(serve, free, shards=shards))


def qwen3_plan(free: int | DeviceMemory, **options: Any) -> MemoryPlan:
    """Qwen3-8B with its drafter in bfloat16 against `free` bytes."""
    serve = dj.ServeConfig(**options)
    config = resolved(serve, QWEN3_8B, QWEN3_8B_DRAFTER, "gpu")
    return make_plan(config, inputs(serve, free, QWEN3_8B_WEIGHTS))


def measured(temporaries: int) -> Measured:
    """What one program of a compiled engine says."""
    return Measured("round of 4 rows", temporaries, {"round of 4 rows": temporaries})


def unchecked(**options: object) -> dj.ServeConfig:
    """Options as they arrive where nobody checks types."""
    config = dj.ServeConfig()
    for name, value in options.items():
        object.__setattr__(config, name, value)
    return config


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
