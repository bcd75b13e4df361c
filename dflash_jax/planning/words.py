"""What a plan says: the refusal with its remedies, the table, the JSON document.

Text primitives are `report.py`'s, numbers `verdict.py`'s.
"""

from typing import Any

from dflash_jax.planning.context_rules import budget_lever, over_budget
from dflash_jax.planning.footprint import formulas
from dflash_jax.planning.report import bar, gib, table
from dflash_jax.planning.verdict import LABELS, POOL, Sizing

_SAYS = {
    "fits": "it fits, with the reserve",
    "unproven": "it fits, but not with the reserve: the compiled programs decide",
    "refused": "it does not fit",
}


def refusal(plan: Sizing) -> str:
    """Why it does not fit, with the numbers, the largest that does, and the levers."""
    reasons, levers = [], [plan.inputs.memory.lever]
    if plan.rowless:
        reasons.append(_no_row(plan))
    if plan.over_budget:
        reasons.append(over_budget(plan.over_budget))
        levers = [budget_lever(plan.over_budget, plan.inputs.order.order)]
    kept = plan.kept if plan.strict else 0
    if plan.needed + kept > plan.available or not reasons:
        reasons.insert(0, _needs(plan, kept))
    return "; ".join([*reasons, *_remedies(plan), *levers])


def lines(plan: Sizing) -> list[str]:
    """The table, the bar and the verdict."""
    config = plan.config
    shards = "" if plan.inputs.shards == 1 else f", on each of {plan.inputs.shards} devices"
    return [
        f"memory plan: {config.max_batch_size} rows of {config.max_seq_len:,} tokens, speculation "
        f"{config.speculation} (K = {config.max_draft_len}), {config.dtype}{shards}",
        *table(_cells(plan)),
        *bar(list(plan.rows.items()), plan.available),
        *_verdict_lines(plan),
        *(f"warning: {warning}" for warning in plan.warnings),
    ]


def document(plan: Sizing) -> dict[str, Any]:
    """The plan as one JSON document."""
    config, texts = plan.config, _texts(plan)
    sizes = ("max_seq_len", "max_batch_size", "max_num_tokens", "max_draft_len")
    kinds = ("speculation", "dtype", "kv_layout", "context_store")
    return {
        "verdict": plan.verdict,
        "fits": plan.fits,
        "needed": plan.needed,
        "reserve": plan.reserve,
        "available": plan.available,
        "rows": {name: {"bytes": size, "formula": texts[name]} for name, size in plan.rows.items()},
        "device": plan.inputs.memory._asdict(),
        "measured": None if plan.measured is None else plan.measured._asdict(),
        "largest_batch_size": plan.largest_batch_size,
        "largest_seq_len": plan.largest_seq_len,
        "largest_unproven_batch_size": plan.unproven.batch_size,
        "largest_unproven_seq_len": plan.unproven.seq_len,
        "rows_per_step": plan.rows_per_step,
        **{name: getattr(config, name) for name in (*sizes, *kinds)},
        "shards": plan.inputs.shards,
        "allocation_order": plan.inputs.order._asdict(),
        "headroom": plan.inputs.serve.headroom,
        "warnings": list(plan.warnings),
        "refusal": refusal(plan) if plan.verdict == "refused" else None,
    }


def _needs(plan: Sizing, kept: int) -> str:
    """The total rule with its numbers."""
    config = plan.config
    parts = [f"{name} {gib(size)}" for name, size in plan.rows.items() if size]
    parts += [f"reserve {gib(kept)}"] if kept else []
    return (
        f"max_batch_size={config.max_batch_size} at max_seq_len={config.max_seq_len} needs "
        f"{gib(plan.needed + kept)} on one device and {gib(plan.available)} is free "
        f"({plan.inputs.memory.source}): {' + '.join(parts)}"
    )


def _no_row(plan: Sizing) -> str:
    """A pool without room for one request of the served length."""
    pool, serve = plan.pool, plan.inputs.serve
    assert pool is not None
    sized_by = {
        "kv_max_tokens": serve.kv_max_tokens,
        "kv_max_bytes": serve.kv_max_bytes,
        "kv_memory_fraction": serve.kv_memory_fraction,
    }
    name, value = next((n, v) for n, v in sized_by.items() if v is not None)
    return (
        f"the pool of {pool.pages} pages ({gib(pool.nbytes)}, {name}={value}) holds no row of "
        f"{plan.config.max_seq_len} tokens, which takes {pool.row_pages} pages ({gib(pool.least)})"
    )


def _remedies(plan: Sizing) -> list[str]:
    sizes = {
        "max_batch_size": (plan.proven.batch_size, plan.unproven.batch_size),
        "max_seq_len": (plan.proven.seq_len, plan.unproven.seq_len),
    }
    found = []
    for name, (proven, unproven) in sizes.items():
        (other,) = sizes.keys() - {name}
        beside = f"at {other}={getattr(plan.config, other)}"
        kept = f" ({proven} with the reserve)" if 0 < proven < unproven else ""
        found.append(f"set {name} <= {unproven}{kept}" if unproven else f"no {name} fits {beside}")
    return found


def _texts(plan: Sizing) -> dict[str, str]:
    """What stands behind each number, by the name of its row."""
    named = formulas(plan.config, plan.inputs.weights, shards=plan.inputs.shards)
    texts = {LABELS[name]: text for name, text in named.items()}
    if plan.measured is not None:
        texts["temporaries"] = f"measured, {plan.measured.program}; features and logits among them"
    if plan.pool is not None:
        texts[POOL] = (
            f"{plan.pool.pages:,} pages x {plan.pool.page_bytes:,} B: {plan.pool.rows} rows of "
            f"{plan.config.max_seq_len:,} tokens"
        )
    if plan.config.context_store == "pool":
        texts["context arena"] = "in the pool"
    return texts


def _cells(plan: Sizing) -> list[tuple[str, str, str]]:
    texts, memory = _texts(plan), plan.inputs.memory
    cells = [(f"  {name}", gib(size), texts[name]) for name, size in plan.rows.items()]
    cells.append(("needed", gib(plan.needed), ""))
    if plan.kept:
        cells.append(("reserve", gib(plan.kept), "for what programs need besides"))
    cells.append(("device", gib(memory.total), memory.source))
    taken = {"in use": memory.in_use, "overhead": memory.overhead}
    return cells + [(name, gib(size), "") for name, size in taken.items() if size]


def _verdict_lines(plan: Sizing) -> list[str]:
    config = plan.config
    says = _SAYS[plan.verdict]
    if plan.measured is not None and plan.fits:
        says = "it fits, as the compiled programs say"
    found = [f"verdict: {plan.verdict}: {says}"]
    if plan.rows_per_step < config.max_batch_size:
        found.append(f"rows that decode in one step: {plan.rows_per_step}, in turn")
    for name, proven, unproven in (
        (
            f"largest batch at {config.max_seq_len:,} tokens",
            plan.proven.batch_size,
            plan.unproven.batch_size,
        ),
        (
            f"largest served length at {config.max_batch_size} rows",
            plan.proven.seq_len,
            plan.unproven.seq_len,
        ),
    ):
        more = "" if proven == unproven else f" ({unproven:,} without the reserve)"
        found.append(f"{name}: {proven:,}{more}")
    if not plan.fits:
        found.append(
            "levers: max_batch_size, max_seq_len, max_draft_len, dtype, a mesh of more devices; "
            f"{plan.inputs.memory.lever}"
        )
    return found
