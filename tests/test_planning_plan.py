"""The total rule: verdicts, remedies and largest sizes, held against sums written out by hand."""

import dataclasses
import logging
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.planning.device import DeviceMemory, card_memory, devices_memory, given_memory
from dflash_jax.planning.plan import findings, fit_batch, make_plan, refuse_unfit
from planning_pairs import (
    GIB,
    QWEN3_8B,
    QWEN3_8B_DRAFTER,
    QWEN3_8B_WEIGHTS,
    RESERVE,
    TINY_DRAFTER,
    inputs,
    measured,
    qwen3_plan,
    resolved,
    row_state,
    tiny_plan,
)

# Qwen3-8B and its drafter in bfloat16, by hand.
WEIGHTS = 2 * (8_190_735_360 + 1_048_626_432)
FEATURES = 2048 * 5 * 4096 * 2
# K/V of 36 + 5 layers, 16 rows of logits, the token state.
STATE = row_state(151_936)
ROW = 49_168 * (147_456 + 20_480) + 16 * 151_936 * 4 + STATE
BESIDE_ROWS = WEIGHTS + FEATURES + 4


def least(plan: dj.MemoryPlan) -> int:
    """Bytes with which a plan fits exactly."""
    return plan.needed + RESERVE


def test_qwen3_8b_at_49152_by_16_is_refused_on_80_gib_with_both_remedies():
    """By its context budget alone it would pass: the KV arena needs 108 GiB."""
    plan = qwen3_plan(given_memory("80GiB"), max_seq_len=49_152, max_batch_size=16)
    assert (plan.verdict, plan.fits) == ("refused", False)
    assert plan.needed == BESIDE_ROWS + 16 * ROW
    assert plan.rows["KV arena"] == 16 * 49_168 * 147_456
    with pytest.raises(dj.MemoryPlanError) as refused:
        refuse_unfit(plan)
    message = str(refused.value)
    assert "max_batch_size=16 at max_seq_len=49152" in message
    assert "KV arena 108.04 GiB" in message and "context arena 15.00 GiB" in message
    assert "needs 140.48 GiB" in message and "80.00 GiB is free" in message
    assert "device_memory='80GiB'" in message
    # (80 GiB - what is beside the rows) / row = 8.15, and 7.37 with the reserve.
    assert "set max_batch_size <= 8 (7 with the reserve)" in message
    assert "set max_seq_len <= 24981 (22584 with the reserve)" in message


def test_the_largest_sizes_of_qwen3_8b_are_those_of_the_division():
    plan = qwen3_plan(80 * GIB, max_seq_len=49_152, max_batch_size=16)
    assert plan.unproven.batch_size == (80 * GIB - BESIDE_ROWS) // ROW == 8
    assert plan.largest_batch_size == (80 * GIB - RESERVE - BESIDE_ROWS) // ROW == 7
    # 16 rows: logits and state as they are, positions shared among them.
    rest = 80 * GIB - BESIDE_ROWS - 16 * (16 * 151_936 * 4 + STATE)
    assert plan.unproven.seq_len == rest // (16 * 167_936) - 16 == 24_981
    assert plan.largest_seq_len == (rest - RESERVE) // (16 * 167_936) - 16 == 22_584


@pytest.mark.parametrize("name, size", [("max_batch_size", 8), ("max_seq_len", 24_981)])
def test_what_a_refusal_names_passes_and_one_more_does_not(name, size):
    asked: dict[str, Any] = {"max_seq_len": 49_152, "max_batch_size": 16}
    assert qwen3_plan(80 * GIB, **(asked | {name: size})).verdict == "unproven"
    assert qwen3_plan(80 * GIB, **(asked | {name: size + 1})).verdict == "refused"


def test_a_drafter_made_for_a_million_positions_plans_by_the_served_length():
    """1,048,584 / 49,160 rows: 21.33 times less than by its own table."""
    target = dataclasses.replace(QWEN3_8B, max_position_embeddings=2**21)
    drafter = dataclasses.replace(
        QWEN3_8B_DRAFTER, max_position_embeddings=2**20, block_size=8, num_hidden_layers=5
    )
    arenas = {}
    for served in (49_152, 2**20, 2**21):
        serve = dj.ServeConfig(max_seq_len=served, max_batch_size=1)
        plan = make_plan(
            resolved(serve, target, drafter, "gpu"), inputs(serve, 10**13, QWEN3_8B_WEIGHTS)
        )
        arenas[served] = plan.rows["context arena"]
    assert arenas[49_152] == 49_160 * 20_480
    assert arenas[2**20] == arenas[2**21] == 1_048_584 * 20_480
    assert f"{arenas[2**20] / arenas[49_152]:.2f}" == "21.33"


def test_equality_passes_and_one_byte_less_does_not():
    need = tiny_plan(10**12).needed
    assert tiny_plan(need + RESERVE).verdict == "fits"
    assert tiny_plan(need + RESERVE - 1).verdict == "unproven"
    assert tiny_plan(need).verdict == "unproven"
    assert tiny_plan(need - 1).verdict == "refused"


def test_one_byte_less_names_the_batch_below_and_that_one_passes():
    need = tiny_plan(10**12).needed
    refused = tiny_plan(need - 1)
    assert refused.unproven.batch_size == 3
    assert "set max_batch_size <= 3" in refused.refusal()
    assert findings(refused) == [refused.refusal()]
    smaller = tiny_plan(need - 1, max_batch_size=3)
    assert smaller.verdict == "unproven" and findings(smaller) == []
    refuse_unfit(smaller)


def test_a_plan_that_nothing_fits_says_so_for_both_sizes():
    plan = tiny_plan(100)
    assert plan.verdict == "refused"
    assert (plan.largest_batch_size, plan.unproven.batch_size) == (0, 0)
    assert "no max_batch_size fits at max_seq_len=64" in plan.refusal()
    assert "no max_seq_len fits at max_batch_size=4" in plan.refusal()
    assert "<= 0" not in plan.refusal()


def test_the_largest_sizes_end_where_the_token_rule_and_the_positions_do():
    plan = tiny_plan(10**15, max_num_tokens=100)
    assert plan.largest_batch_size == 25
    assert plan.largest_seq_len == 512


def test_rows_that_take_turns_may_be_more_than_decode_in_a_step():
    plan = tiny_plan(least(tiny_plan(10**12)) + 10**7, max_num_tokens=16, allow_token_limited=True)
    assert plan.largest_batch_size > 4
    turns = tiny_plan(10**12, max_batch_size=32, max_num_tokens=16, allow_token_limited=True)
    assert turns.rows_per_step == 4
    assert "rows that decode in one step: 4" in str(turns)


def test_what_is_in_use_is_not_free():
    """Fault 100: 60 of 80 GiB are ours and 6 are in use."""

    class Card:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 60 * GIB, "bytes_in_use": 6 * GIB}

    plan = qwen3_plan(devices_memory([Card()]), max_seq_len=8192, max_batch_size=64)
    assert plan.available == 54 * GIB and plan.verdict == "refused"
    assert "54.00 GiB is free (bytes_limit of" in plan.refusal()
    assert "XLA_CLIENT_MEM_FRACTION" in plan.refusal()
    assert "in use" in str(plan) and "XLA_CLIENT_MEM_FRACTION" in str(plan)


def test_of_a_card_the_overhead_is_not_free():
    plan = tiny_plan(card_memory("80GiB"))
    assert plan.available == 76 * GIB
    assert "overhead" in str(plan)


def test_seed_headroom_keeps_overhead_and_reserve_strictly():
    need = tiny_plan(10**12).needed
    total = need + 10 * GIB
    assert tiny_plan(total, headroom="seed").verdict == "fits"
    refused = tiny_plan(total - 1, headroom="seed")
    assert refused.verdict == "refused"
    assert refused.unproven == refused.proven
    assert refused.largest_batch_size == 3
    assert (
        "reserve 6.00 GiB" in refused.refusal() and "set max_batch_size <= 3" in refused.refusal()
    )
    assert "with the reserve)" not in refused.refusal()
    assert tiny_plan(total - 1).verdict == "fits"


def test_seed_headroom_takes_the_overhead_of_a_card_once():
    need = tiny_plan(10**12).needed
    card = card_memory(need + 10 * GIB)
    assert tiny_plan(card, headroom="seed").verdict == "fits"


def test_the_rows_add_up_to_what_is_needed():
    plan = tiny_plan(10**12)
    assert sum(plan.rows.values()) == plan.needed
    assert list(plan.rows) == [
        "target weights",
        "drafter weights",
        "KV arena",
        "context arena",
        "features",
        "logits",
        "token state",
    ]


def test_measured_temporaries_take_the_place_of_the_reserve():
    need = tiny_plan(10**12).needed
    floor = tiny_plan(10**12).footprint.buffers
    unproven = tiny_plan(need + 1000)
    assert unproven.verdict == "unproven"
    proven = unproven.with_measured(measured(floor + 1000))
    assert proven.verdict == "fits" and proven.needed == need + 1000
    assert proven.rows["temporaries"] == floor + 1000
    assert "features" not in proven.rows and sum(proven.rows.values()) == proven.needed
    assert "measured, round of 4 rows" in str(proven)
    refused = unproven.with_measured(measured(floor + 1001))
    assert refused.verdict == "refused"
    assert refused.largest_batch_size == 3
    assert "temporaries" in refused.refusal()


@pytest.mark.parametrize("temporaries", [0, 1])
def test_a_measurement_below_the_floor_leaves_the_floor(temporaries):
    """Fault 101: analyses read 0 on some devices; the plan's own figure is the floor."""
    plan = tiny_plan(10**12)
    found = plan.with_measured(measured(temporaries))
    assert found.needed == plan.needed and found.rows == plan.rows


def test_no_measurement_leaves_the_plan():
    """Fault 101."""
    plan = tiny_plan(10**12)
    assert plan.with_measured(None) is plan


def test_a_measurement_does_not_lift_the_strict_reserve():
    total = tiny_plan(10**12).needed + 10 * GIB
    floor = tiny_plan(10**12).footprint.buffers
    plan = tiny_plan(total, headroom="seed")
    assert plan.with_measured(measured(floor)).verdict == "fits"
    assert plan.with_measured(measured(floor + 1)).verdict == "refused"


def fitted(caplog, free: int, **options: Any) -> tuple[dj.MemoryPlan, list[str]]:
    caplog.set_level(logging.WARNING, "dflash_jax")
    serve = dj.ServeConfig(max_seq_len=64, **options)
    plan = fit_batch(resolved(serve), inputs(serve, free))
    return plan, [record.getMessage() for record in caplog.records]


def test_a_batch_that_was_left_open_is_lowered_to_what_fits_with_one_warning(caplog):
    plan, said = fitted(caplog, least(tiny_plan(10**12)))
    assert plan.config.max_batch_size == 4 and plan.verdict == "fits"
    assert len(said) == 1 and "clamping max_batch_size to 4" in said[0]
    again, said = fitted(caplog, least(tiny_plan(10**12)), max_batch_size=4)
    assert again.config == plan.config and len(said) == 1


def test_a_batch_that_was_asked_for_is_refused_and_not_lowered(caplog):
    plan, said = fitted(caplog, tiny_plan(10**12).needed, max_batch_size=5)
    assert plan.config.max_batch_size == 5 and plan.verdict == "refused" and said == []


def test_a_batch_without_the_reserve_is_better_than_none(caplog):
    plan, said = fitted(caplog, tiny_plan(10**12, max_batch_size=2).needed)
    assert plan.config.max_batch_size == 2 and plan.verdict == "unproven" and len(said) == 1


@pytest.mark.parametrize("free, batch", [(100, 16), (10**12, 16)])
def test_nothing_is_lowered_where_nothing_or_everything_fits(caplog, free, batch):
    plan, said = fitted(caplog, free)
    assert plan.config.max_batch_size == batch and said == []


def test_a_sweep_over_served_lengths_falls_and_matches_single_plans():
    base = qwen3_plan(80 * GIB, max_seq_len=4096, max_batch_size=1)
    sweep = {
        length: make_plan(base.config.with_seq_len(length), base.inputs)
        for length in (1024, 4096, 49_152, 131_072)
    }
    largest = [plan.largest_batch_size for plan in sweep.values()]
    assert largest == sorted(largest, reverse=True) and largest[-1] == 2
    assert largest[2] == 7
    for length, plan in sweep.items():
        alone = qwen3_plan(80 * GIB, max_seq_len=length, max_batch_size=1)
        assert alone.proven == plan.proven and alone.unproven == plan.unproven


def test_a_device_with_nothing_free_is_a_plan_and_no_crash():
    plan = tiny_plan(DeviceMemory(GIB, 2 * GIB, "test"))
    assert plan.available == 0 and plan.verdict == "refused"
    assert "0 B is free" in plan.refusal() and "beyond the device" in str(plan)


def test_a_drafter_of_its_own_positions_is_planned_by_them():
    short = dataclasses.replace(TINY_DRAFTER, max_position_embeddings=40)
    serve = dj.ServeConfig(max_seq_len=64, max_batch_size=4)
    plan = make_plan(resolved(serve, drafter=short), inputs(serve, 10**12))
    assert plan.rows["context arena"] == 4 * 44 * 2 * 2 * 16 * 2 * 4
