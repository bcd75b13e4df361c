"""The total rule in numbers: everything that one device holds against what it has.

    weights + KV arena or pool + context arena + features + logits + token state + headroom <= total

Pure: a resolved configuration, weight bytes and a `DeviceMemory` in, bytes and the largest sizes
out. The verdict and its words are `plan.py`'s.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from dflash_jax.config import ResolvedConfig, ServeConfig
from dflash_jax.planning.budget import AllocationOrder, derived_context_budget
from dflash_jax.planning.context_rules import ArenaFit, arena_fit
from dflash_jax.planning.device import DeviceMemory
from dflash_jax.planning.footprint import Footprint, Weights, dtype_bytes, footprint
from dflash_jax.planning.measured import Measured
from dflash_jax.planning.pool import Pool, plan_pool


class Inputs(NamedTuple):
    """What a plan is made from, besides the configuration.

    Attributes:
        serve: what the user asked for; says what was left open and how the pool is sized.
        weights: parameter bytes of one device.
        shards: devices that heads are divided over.
        order: which of arena and pool comes first, and who decided it.
        host_memory: the device is the host, whose memory others need too.
    """

    serve: ServeConfig
    weights: Weights
    memory: DeviceMemory
    shards: int
    order: AllocationOrder
    host_memory: bool = False


class Limits(NamedTuple):
    """The largest batch (at this served length) and served length (at this batch); 0: none."""

    batch_size: int
    seq_len: int


class Sized(NamedTuple):
    """The bytes of a configuration, and its pool where it has one."""

    held: Footprint
    pool: Pool | None


def needed(held: Footprint, pool: Pool | None, measured: Measured | None) -> int:
    """Bytes on one device; measured temporaries in place of features and logits, their floor."""
    return held.total + _beyond_floor(held, measured) + (0 if pool is None else pool.nbytes)


def sized(
    config: ResolvedConfig,
    inputs: Inputs,
    *,
    reserve: int = 0,
    measured: Measured | None = None,
) -> Sized:
    """Sizes everything; a pool takes no more than reserve and measured temporaries leave."""
    held = footprint(config, inputs.weights, shards=inputs.shards)
    if config.kv_layout != "paged":
        return Sized(held, None)
    pool = plan_pool(
        config,
        inputs.serve,
        held,
        free=inputs.memory.free,
        order=inputs.order.order,
        kept=reserve + _beyond_floor(held, measured),
        shards=inputs.shards,
        host_memory=inputs.host_memory,
    )
    return Sized(held, pool)


def within(
    config: ResolvedConfig, inputs: Inputs, *, reserve: int, measured: Measured | None = None
) -> bool:
    """Whether a configuration fits with the reserve; equality does."""
    held, pool = sized(config, inputs, reserve=reserve, measured=measured)
    if pool is not None and pool.rows < 1:
        return False
    if needed(held, pool, measured) + reserve > inputs.memory.free:
        return False
    return arena_over_budget(config, inputs) is None


def arena_over_budget(config: ResolvedConfig, inputs: Inputs) -> ArenaFit | None:
    """The reference's budget as one more rule where a pool competes with a private arena."""
    serve, memory, drafter = inputs.serve, inputs.memory, config.drafter
    private = config.kv_layout == "paged" and config.context_store == "arena"
    if drafter is None or not private or serve.skip_context_budget_check:
        return None
    budget = derived_context_budget(
        total=memory.total - memory.in_use,
        weights=sum(inputs.weights),
        kv_fraction=serve.kv_memory_fraction,
        kv_max_tokens=serve.kv_max_tokens,
        kv_max_bytes=serve.kv_max_bytes,
        order=inputs.order.order,
        overhead=memory.overhead,
    )
    if budget is None:
        return None
    fit = arena_fit(
        drafter,
        budget=budget,
        max_batch_size=config.max_batch_size,
        max_seq_len=config.max_seq_len,
        max_draft_len=config.max_draft_len,
        paged=config.draft_attention == "pallas",
        page_size=config.page_size,
        dtype_bytes=dtype_bytes(config),
        shards=inputs.shards,
        scratch_rows=0,
    )
    return None if fit.fits else fit


def limits(
    config: ResolvedConfig, inputs: Inputs, *, reserve: int, measured: Measured | None = None
) -> Limits:
    """Largest batch and served length that are within what is free, the reserve kept."""

    def fits(**sizes: int) -> bool:
        changed = dataclasses.replace(config, **sizes)
        return within(changed, inputs, reserve=reserve, measured=measured)

    step = config.max_num_tokens // config.verify_width
    most = 2**20 if inputs.serve.allow_token_limited else step
    return Limits(
        batch_size=largest(lambda batch: fits(max_batch_size=batch), most),
        seq_len=largest(
            lambda length: fits(max_seq_len=length), config.target.max_position_embeddings
        ),
    )


def _beyond_floor(held: Footprint, measured: Measured | None) -> int:
    """What the compiled programs need besides features and logits."""
    return 0 if measured is None else max(0, measured.temporaries - held.buffers)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1 … most that fits, 0 if none does; `fits` only ever turns false."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
