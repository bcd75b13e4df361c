"""Rows of `gpu_check.py --planner`: a plan at its largest batch boots, and more is refused at once.

The pair has random weights of a few megabytes and arenas that can fill a device: many layers, long
rows, so that one layer's rows, which a pass may hold twice, stay below the plan's reserve.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import dflash_jax as dj
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.models import build_drafter, build_target
from dflash_jax.weights.save import save_parameters

COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 65536,
}
MORE = 1.3


def write_pair(folder: Path, layers: int) -> tuple[Path, Path]:
    """A target of `layers` layers and a drafter of two."""
    target_raw = COMMON | {"num_hidden_layers": layers, "tie_word_embeddings": True}
    drafter_raw = COMMON | {
        "num_hidden_layers": 2,
        "num_target_layers": layers,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, layers - 2]},
    }
    target = build_target(TargetConfig.from_dict(target_raw), dtype=jnp.float32, rngs=nnx.Rngs(0))
    drafter = build_drafter(
        DrafterConfig.from_dict(drafter_raw), dtype=jnp.float32, rngs=nnx.Rngs(1)
    )
    places = folder / "target", folder / "drafter"
    for place, raw in zip(places, (target_raw, drafter_raw), strict=True):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(raw))
    save_parameters(target, places[0], kind="target")
    save_parameters(drafter, places[1], kind="drafter")
    return places


def largest_boots(folder: Path, *, layers: int, max_seq_len: int, **options: Any) -> dict[str, Any]:
    """Plans, starts the largest batch that fits, generates, and asks for 1.3 times as much or more.

    Args:
        options: more of `ServeConfig`, such as `device_memory` where the device has no figures.
    """
    logging.getLogger("dflash_jax").setLevel(logging.INFO)
    pair = write_pair(folder, layers)
    options |= {"max_seq_len": max_seq_len, "max_num_tokens": 2**20}
    plan = dj.plan_memory(*pair, max_batch_size=1, **options)
    batch = plan.largest_batch_size
    # On a device of many times the reserve the first is the larger.
    more = max(int(MORE * batch) + 1, plan.unproven.batch_size + 1)
    if batch < 1:
        raise RuntimeError(f"no batch fits: {plan}")
    begun = time.monotonic()
    try:
        dj.LLM(*pair, max_batch_size=more, **options)
    except dj.MemoryPlanError as error:
        refused, said = time.monotonic() - begun, str(error)
    else:
        raise RuntimeError(f"{more} rows were not refused")
    if refused >= 1:
        raise RuntimeError(f"the refusal took {refused:.2f} s")
    begun = time.monotonic()
    llm = dj.LLM(*pair, max_batch_size=batch, **options)
    started = time.monotonic() - begun
    params = dj.SamplingParams(max_tokens=16, ignore_eos=True)
    answers = llm.generate([[7, 8, 9 + n] for n in range(min(batch, 4))], params)
    if any(len(answer.token_ids) != 16 for answer in answers):
        raise RuntimeError(f"not every answer is whole: {answers}")
    measured = llm.plan.measured
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.arenas))
    return {
        "largest batch": batch,
        "refused batch": more,
        "served length": max_seq_len,
        "available": llm.plan.available,
        "needed": llm.plan.needed,
        "arenas": held,
        "largest temporary": None if measured is None else measured.temporaries,
        "seconds to refuse": refused,
        "seconds to start": started,
        "refusal": said,
        "stats after": jax.devices()[0].memory_stats(),
    }
