"""`dflash-jax train --dry-run`: what a run takes, said before anything is loaded.

The numbers are `training/plan.py`'s; here they are printed, beside this device's memory and the
rate of one matrix product on it.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_jax.cli import output
from dflash_jax.planning.device import devices_memory
from dflash_jax.planning.report import gib

if TYPE_CHECKING:
    from dflash_jax.training.plan import TrainingPlan

_SIZE, _REPEATS = 1024, 4
BASIS = (
    "from counted multiplications and additions, at the rate of one {size} x {size} {dtype} matrix "
    "product measured here now, which real steps do not reach; no step was run; making the answers "
    "is not in it"
)


def prompt_lines(path: Path) -> int:
    """Lines of a prompt file that are not empty."""
    with path.open(encoding="utf-8") as file:
        return sum(bool(line.strip()) for line in file)


def plan_document(plan: "TrainingPlan", dtype: str) -> dict[str, Any]:
    """The plan as JSON, with what this machine adds."""
    import jax

    memory, rate = devices_memory(jax.devices()), product_rate(dtype)
    return {
        "memory": {name: amount._asdict() for name, amount in plan.memory.items()},
        "disk": {name: amount._asdict() for name, amount in plan.disk.items()},
        "needed": plan.needed,
        "available": memory.free,
        "available_source": memory.source,
        "fits": plan.needed <= memory.free,
        "flops_per_step": plan.flops_per_step,
        "flops_per_second": rate,
        "seconds": plan.seconds(rate),
        "seconds_basis": BASIS.format(size=_SIZE, dtype=dtype),
    }


def product_rate(dtype: str) -> float:
    """Multiplications and additions per second of one matrix product, the best of a few."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((_SIZE, _SIZE), dtype)
    product = jax.jit(jnp.matmul)
    best = float("inf")
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        best = min(best, time.perf_counter() - begun)
    return 2.0 * _SIZE**3 / best


def show_plan(document: dict[str, Any], steps: int) -> None:
    """Two tables and the estimate of time, on stderr."""
    for name, caption in (("memory", _verdict(document)), ("disk", None)):
        rows = [
            (what, gib(amount["nbytes"]), amount["formula"])
            for what, amount in document[name].items()
        ]
        output.print_table((name, "size", "counted as"), rows, caption=caption)
    output.print_facts(
        {
            "time": f"{document['seconds'] / 3600:.2f} h for {steps:,} steps",
            "one step": f"{document['flops_per_step'] / 1e9:,.1f} GFLOP",
            "estimated": document["seconds_basis"],
        }
    )


def _verdict(document: dict[str, Any]) -> str:
    held = f"{gib(document['needed'])} of {gib(document['available'])}"
    source = document["available_source"]
    if document["fits"]:
        return f"fits: {held} ({source})"
    return f"does not fit: {held} ({source}); raise --accumulate or lower --anchors"
