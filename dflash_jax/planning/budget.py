"""The reference's context budgets: what is left for the drafter's context, before any allocation.

Pure integers. They decide alone nowhere: the total rule (`plan.py`) always applies, and these are
one more rule where a pool competes with the arena. Constants and both derivations are those of the
reference system, TensorRT-LLM change #19466: overhead 4 GiB, reserve 6 GiB, factor 0.70.
"""

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

GIB = 1024**3
OVERHEAD = 4 * GIB
"""What the runtime itself takes of a card, outside all accounts."""
RESERVE = 6 * GIB
"""Kept for activations when the arena comes first."""
SAFETY = 0.70
"""Share of what the pool leaves that may be promised when the pool comes first."""
SKIP_ESTIMATION = "DFLASH_JAX_SKIP_KV_ESTIMATION"

Order = Literal["arena_first", "pool_first"]


class AllocationOrder(NamedTuple):
    """Which of arena and pool is allocated first, and what decided it."""

    order: Order
    decided_by: str


def allocation_order(asked: Order, environment: Mapping[str, str] = os.environ) -> AllocationOrder:
    """The order that holds: the option's, or pool first where the abstract compile is skipped.

    Without it (`DFLASH_JAX_SKIP_KV_ESTIMATION=1`) nothing is known of the temporaries when the pool
    is sized, which is the reference's case of a pool that commits first.
    """
    if skips_estimation(environment):
        return AllocationOrder("pool_first", f"{SKIP_ESTIMATION}=1")
    return AllocationOrder(asked, f"allocation_order={asked!r}")


def skips_estimation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether gate (iii), the abstract compile, is switched off; only "1" does."""
    return environment.get(SKIP_ESTIMATION) == "1"


def weights_per_device(
    target: int | None, drafter: int | None, *, same: bool = False, devices: int = 1
) -> int | None:
    """Weight bytes of one device from checkpoint sizes; None where neither is known.

    Args:
        same: both models are one checkpoint, which counts once.
        devices: that the weights are divided over.
    """
    if target is None and drafter is None:
        return None
    other = 0 if same and target is not None else drafter or 0
    return ((target or 0) + other) // devices


def context_budget_bytes(
    *,
    total: int,
    weights: int | None,
    kv_fraction: float,
    allocation_order: Order,
    overhead: int = OVERHEAD,
    reserve: int = RESERVE,
    safety: float = SAFETY,
    kv_bytes_cap: int | None = None,
) -> int:
    """Bytes that a private context arena may take.

    arena_first: max(0, max(0, total - overhead - weights) - reserve); the fraction plays no part,
    because the pool takes its share of what the arena leaves.
    pool_first: int((usable - P) * safety) of usable = max(0, total - overhead - weights), the pool
    P = fraction * usable, or the cap where that is smaller.

    Args:
        weights: bytes on this device; None (unknown) subtracts nothing.
        kv_bytes_cap: most bytes of the pool; None or 0: no cap.

    Worked example: 100 GiB with 50 GiB of weights at 0.8: 40 GiB, or 6.44 GiB pool first.
    """
    usable = max(0, total - overhead - (weights or 0))
    if allocation_order == "arena_first":
        return max(0, usable - reserve)
    if kv_bytes_cap and kv_bytes_cap < kv_fraction * usable:
        return int((usable - kv_bytes_cap) * safety)
    return int((1 - kv_fraction) * usable * safety)


def derived_context_budget(
    *,
    total: int | None,
    weights: int | None,
    kv_fraction: float,
    kv_max_tokens: int | None,
    kv_max_bytes: int | None,
    order: Order,
    overhead: int = OVERHEAD,
) -> int | None:
    """The budget, or None where none is derived: no total, or a pool given in tokens."""
    if total is None or kv_max_tokens is not None:
        return None
    return context_budget_bytes(
        total=total,
        weights=weights,
        kv_fraction=kv_fraction,
        allocation_order=order,
        overhead=overhead,
        kv_bytes_cap=kv_max_bytes,
    )
