"""The total rule in numbers: everything that one device holds against what it has.

    weights + KV arena or pool + context arena + features + logits + token state + headroom <= total

Pure: a resolved configuration, weight bytes and a `DeviceMemory` in, bytes and the largest sizes
out. The verdict and its words are `plan.py`'s.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from dflash_jax.config import ResolvedConfig, ServeConfig
from dflash_jax.planning.budget import AllocationOrder
from dflash_jax.planning.device import DeviceMemory
from dflash_jax.planning.footprint import Footprint, Weights, footprint
from dflash_jax.planning.measured import Measured
from dflash_jax.planning.pool import Pool, plan_pool


class Inputs(NamedTuple):
    """What a plan is made from, besides the configuration.

    Attributes:
        serve: what the user asked for; says what was left open and how the pool is sized.
        weights: parameter bytes of one device.
        shards: devices that heads are divided over.
        order: which of arena and pool comes first, and who decided it.
    """

    serve: ServeConfig
    weights: Weights
    memory: DeviceMemory
    shards: int
    order: AllocationOrder


class Limits(NamedTuple):
    """The largest batch (at this served length) and served length (at this batch); 0: none."""

    batch_size: int
    seq_len: int


def needed(held: Footprint, pool: Pool | None, measured: Measured | None) -> int:
    """Bytes on one device; measured temporaries in place of features and logits, their floor."""
    temporaries = 0 if measured is None else max(0, measured.temporaries - held.buffers)
    return held.total + temporaries + (0 if pool is None else pool.nbytes)


def sized(config: ResolvedConfig, inputs: Inputs) -> tuple[Footprint, Pool | None]:
    """The bytes of a configuration, and its pool where it has one."""
    held = footprint(config, inputs.weights, shards=inputs.shards)
    if config.kv_layout != "paged":
        return held, None
    pool = plan_pool(
        config,
        inputs.serve,
        held,
        free=inputs.memory.free,
        order=inputs.order.order,
        shards=inputs.shards,
    )
    return held, pool


def limits(
    config: ResolvedConfig, inputs: Inputs, *, reserve: int, measured: Measured | None = None
) -> Limits:
    """Largest batch and served length whose need, with the reserve, is within what is free."""

    def fits(**sizes: int) -> bool:
        changed = dataclasses.replace(config, **sizes)
        held, pool = sized(changed, inputs)
        if pool is not None:
            # Elastic: what counts is one row of it, and that the arena leaves room for that.
            pool = pool._replace(pages=min(pool.pages, pool.row_pages))
            if pool.rows < 1:
                return False
        return needed(held, pool, measured) + reserve <= inputs.memory.free

    step = config.max_num_tokens // config.verify_width
    most = 2**20 if inputs.serve.allow_token_limited else step
    return Limits(
        batch_size=largest(lambda batch: fits(max_batch_size=batch), most),
        seq_len=largest(
            lambda length: fits(max_seq_len=length), config.target.max_position_embeddings
        ),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1 … most that fits, 0 if none does; `fits` only ever turns false."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
