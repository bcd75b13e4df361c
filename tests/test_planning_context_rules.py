"""The validator of the context arena: the reference's worked vectors, in this project's terms."""

import re
from typing import Any

import pytest

from validator import GIB, PAGED_SLOT, RAW, SILENT, SLOT, check, drafter, error, warning


def test_the_base_configuration_passes_without_a_word():
    assert check() == SILENT


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_seq_len": None},
        {"budget": None},
        {"drafter": None},
        {"max_num_tokens": 256},
        {"max_num_tokens": None},
        {"budget": 33 * SLOT},
        {"budget": SLOT, "skip_fit": True},
        {"budget": SLOT, "max_seq_len": None},
    ],
)
def test_32_rows_that_fit_or_cannot_be_checked_pass_without_a_word(changes):
    assert check(max_batch_size=32, **changes) == SILENT


def test_without_a_batch_nothing_is_checked():
    assert check(max_batch_size=None, max_num_tokens=1, budget=1, max_draft_len=3) == SILENT


def test_ten_slots_hold_nine_rows_and_the_message_has_every_number():
    message = error(max_batch_size=32, budget=10 * SLOT)
    assert "needs 1.29 GiB" in message
    assert f"budget is {10 * SLOT / GIB:.2f} GiB" in message
    assert "max_batch_size <= 9 fits (an estimate" in message
    assert "(max_batch_size + 1) rows x K and V x layers x (context + block)" in message
    assert "33 x 2 x 5 x (8192 + 8) x 4 x 64 x 2" in message


def test_one_byte_less_refuses_and_the_batch_that_is_named_passes():
    message = error(max_batch_size=32, budget=33 * SLOT - 1)
    named = int(re.findall(r"max_batch_size <= (\d+)", message)[0])
    assert named == 31
    assert check(max_batch_size=named, budget=33 * SLOT - 1) == SILENT
    assert check(max_batch_size=named + 1, budget=33 * SLOT - 1).errors


@pytest.mark.parametrize("budget", [0, 1, SLOT, 2 * SLOT - 1])
def test_a_budget_of_one_slot_holds_no_batch_and_says_so(budget):
    """The scratch row takes it: fitting = 0."""
    message = error(max_batch_size=32, budget=budget)
    assert "(8192 + 8)" in message
    assert "no max_batch_size fits" in message and "max_seq_len" in message
    assert "lower max_batch_size" not in message and "<=" not in message


def test_two_slots_hold_one_row():
    assert "max_batch_size <= 1 fits" in error(max_batch_size=32, budget=2 * SLOT)
    assert check(max_batch_size=1, budget=2 * SLOT) == SILENT


def test_without_scratch_rows_every_slot_is_a_request():
    assert check(max_batch_size=10, budget=10 * SLOT, scratch_rows=0) == SILENT
    message = error(max_batch_size=11, budget=10 * SLOT, scratch_rows=0)
    assert "max_batch_size <= 10 fits" in message and "(max_batch_size) rows" in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_seq_len": None},
        {"context_store": "pool"},
        {"draft_attention": "pallas"},
        {"skip_fit": True},
        {"budget": 1, "max_draft_len": 7},
    ],
)
def test_the_token_rule_comes_first_whatever_follows(changes):
    """32 rows of 8 tokens need 256; 100 tokens hold 12 rows."""
    message = error(max_batch_size=32, max_num_tokens=100, **changes)
    assert "256 tokens" in message
    assert "max_num_tokens >= 256" in message
    assert "max_batch_size <= 12" in message
    assert check(max_batch_size=32, max_num_tokens=100, **changes).warnings == []


def test_a_token_budget_that_holds_no_row_says_that_no_batch_fits():
    message = error(max_batch_size=1, max_num_tokens=4)
    assert "max_num_tokens >= 8" in message and "no batch fits" in message
    assert "<= 0" not in message


def test_rows_may_be_allowed_to_take_turns():
    """32 rows at 128 tokens: 16 decode at once."""
    assert "max_batch_size <= 16" in error(max_batch_size=32, max_num_tokens=128)
    assert check(max_batch_size=32, max_num_tokens=128, allow_token_limited=True) == SILENT


@pytest.mark.parametrize(
    "made",
    [
        drafter(),
        drafter(block_size=None, dflash_config={**RAW["dflash_config"], "block_size": 8}),
    ],
    ids=["top level", "nested"],
)
def test_a_narrow_block_draws_one_warning_that_names_the_trained_width(made):
    assert "max_draft_len=7" in warning(max_draft_len=3, drafter=made)
    assert check(max_draft_len=7, drafter=made) == SILENT


@pytest.mark.parametrize("skipped", [{"max_seq_len": None}, {"budget": None}, {"skip_fit": True}])
def test_the_width_warning_comes_even_where_the_fit_is_not_checked(skipped):
    assert "max_draft_len=7" in warning(max_draft_len=3, **skipped)


def test_the_width_warning_comes_before_the_refusal():
    errors, warnings = check(max_batch_size=32, max_draft_len=3, budget=SLOT)
    assert len(errors) == len(warnings) == 1
    assert "max_draft_len=7" in warnings[0]
    assert "(8192 + 4)" in errors[0]


def test_a_block_wider_than_trained_is_not_this_rules_business():
    assert check(max_draft_len=9, max_num_tokens=None) == SILENT


@pytest.mark.parametrize(
    "changes, same",
    [
        ({"head_dim": None}, 64),
        ({"num_key_value_heads": None, "num_attention_heads": 16}, 64),
        ({"num_key_value_heads": None, "num_attention_heads": 16, "hidden_size": 1024}, 64),
    ],
)
def test_geometry_that_is_left_out_is_inferred(changes, same):
    made = drafter(**changes)
    assert (made.num_key_value_heads, made.head_dim) == (16, same)
    assert "33 x 2 x 5 x (8192 + 8) x 4 x 64 x 2" in error(
        drafter=made, max_batch_size=32, budget=10 * SLOT
    )


def test_a_drafter_made_for_a_million_positions_is_sized_by_the_served_length():
    """165.00 GiB by its own positions, 7.74 GiB by the 49,152 that are served."""
    assert "165.00 GiB" in error(max_batch_size=32, max_seq_len=2_097_152, budget=0)
    assert "needs 7.74 GiB" in error(max_batch_size=32, max_seq_len=49_152, budget=0)


def test_paged_drafter_attention_rounds_each_row_up_to_pages():
    assert PAGED_SLOT > SLOT
    paged: dict[str, Any] = {"max_batch_size": 32, "draft_attention": "pallas"}
    assert check(**paged, budget=33 * PAGED_SLOT) == SILENT
    message = error(**paged, budget=33 * PAGED_SLOT - 1)
    assert "max_batch_size <= 31" in message and "pages of 32" in message
    assert check(**paged, budget=33 * SLOT).errors
    assert "pages" not in error(max_batch_size=32, budget=SLOT)


def test_bytes_of_a_number_and_shards_scale_the_arena():
    assert check(max_batch_size=32, budget=66 * SLOT, dtype_bytes=4) == SILENT
    assert check(max_batch_size=32, budget=66 * SLOT - 1, dtype_bytes=4).errors
    # 16 KV heads over 3 devices: 6 on the fullest.
    assert check(max_batch_size=32, budget=33 * SLOT * 6 // 4, shards=3) == SILENT
    assert check(max_batch_size=32, budget=33 * SLOT * 6 // 4 - 1, shards=3).errors


def test_arena_first_never_advises_to_lower_the_fraction():
    message = error(max_batch_size=32, budget=10 * SLOT, order="arena_first")
    assert "before the pool is sized" in message
    assert "kv_memory_fraction of the remainder" in message
    assert "lower max_batch_size or max_seq_len" in message
    assert "lower kv_memory_fraction" not in message


def test_pool_first_advises_to_lower_the_fraction():
    message = error(max_batch_size=32, budget=10 * SLOT, order="pool_first")
    assert "the pool is allocated before" in message
    assert "lower kv_memory_fraction" in message


def test_a_context_in_the_pool_that_is_over_budget_only_warns():
    """Row 16: one warning, in the conditional; the pool queues requests."""
    said = warning(max_batch_size=32, budget=10 * PAGED_SLOT, context_store="pool")
    assert "context_store='pool'" in said
    assert "10 rows of 8192 tokens" in said
    assert "if requests are that long, admission queues" in said
    assert f"{33 * PAGED_SLOT / GIB:.2f} GiB" in said


def test_a_pool_that_holds_one_row_warns_and_one_that_holds_none_is_refused():
    pool: dict[str, Any] = {"max_batch_size": 32, "context_store": "pool"}
    assert "1 rows of 8192 tokens" in warning(**pool, budget=PAGED_SLOT)
    message = error(**pool, budget=PAGED_SLOT - 1)
    assert "no max_batch_size fits" in message and "max_seq_len" in message
    assert "arena" not in message
    assert check(**pool, budget=PAGED_SLOT - 1).warnings == []


def test_the_skip_flag_silences_refusal_and_warning_alike():
    assert check(max_batch_size=32, budget=0, skip_fit=True) == SILENT
    assert check(max_batch_size=32, budget=0, skip_fit=True, context_store="pool") == SILENT
    assert check(max_batch_size=32, max_num_tokens=100, skip_fit=True).errors
