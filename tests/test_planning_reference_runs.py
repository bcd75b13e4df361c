"""Budget and validator together: the reference's measured runs, its wiring and its clamp."""

from typing import Any

import pytest

from dflash_jax.planning.budget import context_budget_bytes
from dflash_jax.planning.context_rules import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_NUM_TOKENS,
    clamped_batch_size,
)
from validator import GIB, RAW, SILENT, check, drafter, error, warning

L0 = drafter(
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    block_size=None,
    dflash_config={**RAW["dflash_config"], "block_size": 16},
)


@pytest.mark.parametrize("total, weights, largest", [(178, 62, 99), (79, 33, 36)])
def test_the_accuracy_runs_of_the_reference_pass_arena_first_only(total, weights, largest):
    """128 rows of 4096 at K 4: 10.09 GiB; the width warning (4 < 15) in every order."""
    run: dict[str, Any] = {
        "drafter": L0,
        "max_batch_size": 128,
        "max_seq_len": 4096,
        "max_draft_len": 4,
        "max_num_tokens": 4096,
        "shards": 1,
    }
    budgets = {
        order: context_budget_bytes(
            total=total * GIB, weights=weights * GIB, kv_fraction=0.9, allocation_order=order
        )
        for order in ("arena_first", "pool_first")
    }
    assert "max_draft_len=15" in warning(**run, budget=budgets["arena_first"])
    refused = check(**run, budget=budgets["pool_first"], order="pool_first")
    assert len(refused.errors) == len(refused.warnings) == 1
    assert "needs 10.09 GiB" in refused.errors[0]
    assert f"max_batch_size <= {largest} fits" in refused.errors[0]


def test_200_gib_over_four_devices_pool_first_hold_163_rows():
    """§1.5: 201 slots need 7.86 GiB, 6.44 GiB are left; arena first there are 40 GiB."""
    wiring: dict[str, Any] = {"max_batch_size": 200, "max_num_tokens": None}
    numbers: dict[str, Any] = {
        "total": 100 * GIB,
        "weights": 200 * GIB // 4,
        "kv_fraction": 0.8,
    }
    left = context_budget_bytes(**numbers, allocation_order="pool_first")
    message = error(**wiring, budget=left, order="pool_first")
    assert "needs 7.86 GiB" in message and "budget is 6.44 GiB" in message
    assert "max_batch_size <= 163 fits" in message and "lower kv_memory_fraction" in message
    left = context_budget_bytes(**numbers, allocation_order="arena_first")
    assert check(**wiring, budget=left) == SILENT


@pytest.mark.parametrize(
    "draft_len, tokens, expected", [(3, 8192, 2048), (4, 8192, 1638), (7, 8192, 1024)]
)
def test_the_stock_batch_is_clamped_to_the_token_budget(draft_len, tokens, expected):
    assert (DEFAULT_BATCH_SIZE, DEFAULT_NUM_TOKENS) == (2048, 8192)
    assert clamped_batch_size(tokens, draft_len, DEFAULT_BATCH_SIZE) == expected


@pytest.mark.parametrize("draft_len, tokens, expected", [(15, 8192, 512), (7, 100, 12), (7, 4, 0)])
def test_a_clamped_batch_satisfies_the_rule_and_stays(draft_len, tokens, expected):
    batch = clamped_batch_size(tokens, draft_len, DEFAULT_BATCH_SIZE)
    assert batch == expected
    assert clamped_batch_size(tokens, draft_len, batch) == batch
    if batch:
        again = check(max_batch_size=batch, max_num_tokens=tokens, max_draft_len=draft_len)
        assert again.errors == []
