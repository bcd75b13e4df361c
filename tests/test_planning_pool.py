"""A paged pool in the plan: its share, its caps, its rows, and the arena that it competes with.

Fixture T in float32, 4 rows of 64 + 4 positions: 3 pages of 32 tokens a row.
"""

import json
from typing import Any

import pytest

import dflash_jax as dj
from planning_pairs import GIB, RESERVE, measured, row_state, tiny_plan

PAGE = 32 * 1536
HELD = 1500 + 64 * 2 * 32 * 4 + 16 * 97 * 4 + 4 * row_state(97) + 4 + 4 * 3 * 4
"""Weights, features, logits, state and the table of pages; context and K/V lie in the pool."""


def pool_plan(free: int, **options: Any) -> dj.MemoryPlan:
    return tiny_plan(free, kv_layout="paged", context_store="pool", **options)


def test_a_pool_takes_its_share_of_what_is_left():
    plan = pool_plan(HELD + 20 * GIB, kv_memory_fraction=0.5)
    assert plan.pool is not None
    assert plan.pool.pages == 10 * GIB // PAGE
    assert plan.rows["KV pool"] == plan.pool.nbytes == plan.pool.pages * PAGE
    assert plan.needed == HELD + plan.pool.nbytes == sum(plan.rows.values())
    assert plan.verdict == "fits" and plan.rows["context arena"] == 0
    assert f"{plan.pool.pages:,} pages x {PAGE:,} B" in str(plan) and "in the pool" in str(plan)


def test_the_smaller_of_share_and_cap_counts():
    capped = pool_plan(HELD + 20 * GIB, kv_memory_fraction=0.5, kv_max_bytes=GIB)
    assert capped.pool is not None and capped.pool.pages == GIB // PAGE
    above = pool_plan(HELD + 20 * GIB, kv_memory_fraction=0.5, kv_max_bytes=11 * GIB)
    assert above.pool is not None and above.pool.pages == 10 * GIB // PAGE


def test_a_pool_leaves_the_reserve_where_it_can():
    """0.9 of 20 GiB would leave 2 GiB for the programs: the pool is elastic, they are not."""
    plan = pool_plan(HELD + 20 * GIB)
    assert plan.pool is not None and plan.pool.pages == 14 * GIB // PAGE
    assert plan.verdict == "fits"


def test_a_pool_that_can_only_do_without_the_reserve_is_unproven():
    plan = pool_plan(HELD + 5 * GIB, kv_memory_fraction=0.5)
    assert plan.pool is not None and plan.pool.pages == GIB * 5 // 2 // PAGE
    assert plan.verdict == "unproven"
    assert plan.largest_batch_size == 0 and plan.unproven.batch_size > 4


def test_a_measured_pool_shrinks_to_what_the_programs_leave():
    plan = pool_plan(HELD + 5 * GIB, kv_memory_fraction=0.9)
    floor = plan.footprint.buffers
    found = plan.with_measured(measured(floor + 4 * GIB))
    assert found.pool is not None and found.pool.pages == GIB // PAGE
    assert found.verdict == "fits" and found.needed <= HELD + 5 * GIB
    assert sum(found.rows.values()) == found.needed
    none = plan.with_measured(measured(floor + 5 * GIB))
    assert none.verdict == "refused"


def test_tokens_of_a_pool_are_rounded_up_to_pages():
    """100 tokens: 4 pages, one row of 3."""
    plan = pool_plan(10**12, kv_max_tokens=100)
    assert plan.pool is not None and (plan.pool.pages, plan.pool.rows) == (4, 1)
    assert plan.verdict == "fits"


def test_a_pool_that_holds_fewer_rows_than_the_batch_says_once_that_requests_queue():
    (said,) = pool_plan(10**12, kv_max_tokens=96).warnings
    assert "1 rows of 64 tokens" in said and "max_batch_size is 4" in said
    assert "if requests are that long, admission queues" in said
    assert pool_plan(10**12, kv_max_tokens=4 * 96).warnings == ()
    assert len(pool_plan(10**12, kv_max_tokens=96).with_measured(measured(10**6)).warnings) == 1


@pytest.mark.parametrize(
    "options, named",
    [({"kv_max_tokens": 64}, "kv_max_tokens=64"), ({"kv_max_bytes": 3 * PAGE - 1}, "kv_max_bytes")],
)
def test_a_pool_that_cannot_hold_one_row_is_refused_by_the_option_that_sized_it(options, named):
    """2 pages where a row takes 3, on a device with memory to spare."""
    plan = pool_plan(10**12, **options)
    assert plan.verdict == "refused" and plan.warnings == ()
    message = plan.refusal()
    assert "the pool of 2 pages" in message and named in message
    assert "holds no row of 64 tokens, which takes 3 pages" in message
    assert "is free" not in message
    # 2 pages are 64 positions: 60 and the round that starts inside them.
    assert plan.unproven.seq_len == 60 and "set max_seq_len <= 60" in message
    assert pool_plan(10**12, **(options | {"max_seq_len": 60})).verdict == "fits"


def test_memory_for_a_row_less_a_byte_is_refused():
    """The share of 2 x 3 pages is one row."""
    assert pool_plan(HELD + 6 * PAGE, kv_memory_fraction=0.5).verdict == "unproven"
    refused = pool_plan(HELD + 6 * PAGE - 1, kv_memory_fraction=0.5)
    assert refused.verdict == "refused" and "holds no row" in refused.refusal()


def test_a_pool_in_tokens_that_is_too_large_is_refused_with_a_length_that_helps_or_none():
    """It does not shrink: no batch and no length makes room for it."""
    plan = pool_plan(HELD + 100 * PAGE, kv_max_tokens=101 * 32)
    assert plan.verdict == "refused"
    assert plan.unproven.batch_size == 0 and "no max_batch_size fits" in plan.refusal()
    assert pool_plan(HELD + 100 * PAGE, kv_max_tokens=100 * 32).verdict == "unproven"


def private_plan(free: int, **options: Any) -> dj.MemoryPlan:
    return tiny_plan(free, kv_layout="paged", **options)


ARENA_ROW = 68 * 2 * 2 * 16 * 2 * 4


def test_a_private_arena_beside_a_pool_has_the_references_budget():
    """Weights, reserve and one row of the arena, less a byte: the budget refuses 4 rows."""
    free = 1500 + RESERVE + 4 * ARENA_ROW
    assert private_plan(free).over_budget is None
    plan = private_plan(free - 1)
    assert plan.over_budget is not None and plan.verdict == "refused"
    assert "the context arena needs" in plan.refusal()
    assert "lower kv_memory_fraction" not in plan.refusal()
    assert plan.unproven.batch_size == 3
    assert private_plan(free - 1, max_batch_size=3).over_budget is None
    assert private_plan(free - 1, skip_context_budget_check=True).over_budget is None
    assert private_plan(free - 1, kv_max_tokens=96).over_budget is None
    assert pool_plan(free - 1).over_budget is None and tiny_plan(free - 1).over_budget is None


def test_the_budget_of_a_pool_that_comes_first_is_what_it_leaves():
    options: dict[str, Any] = {"allocation_order": "pool_first", "kv_memory_fraction": 0.9}
    free = 1500 + int(4 * ARENA_ROW / 0.7 / 0.1) + 100
    assert private_plan(free, **options).over_budget is None
    plan = private_plan(free - 1000, **options)
    assert plan.over_budget is not None and plan.verdict == "refused"
    assert "lower kv_memory_fraction" in plan.refusal()


def test_an_arena_that_comes_first_takes_its_bytes_off_the_pools_share():
    free = HELD + 4 * ARENA_ROW + 20 * GIB
    first = private_plan(free, kv_memory_fraction=0.5).pool
    second = private_plan(free, kv_memory_fraction=0.5, allocation_order="pool_first").pool
    assert first is not None and second is not None
    assert first.pages == 10 * GIB // (32 * 1024)
    assert second.pages == (10 * GIB + 2 * ARENA_ROW) // (32 * 1024)


def test_the_document_of_a_pool_is_json():
    read = json.loads(json.dumps(private_plan(10**6).to_dict()))
    assert read["kv_layout"] == "paged" and "KV pool" in read["rows"]
    assert read["verdict"] == "refused" and read["refusal"]
