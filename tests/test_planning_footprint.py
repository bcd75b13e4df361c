"""The bytes of one device, held against sums that are written out here by hand."""

import dataclasses
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.planning import footprint as sizes
from dflash_jax.planning.footprint import Footprint, footprint, formulas, page_bytes
from planning_pairs import (
    QWEN3_8B,
    QWEN3_8B_DRAFTER,
    QWEN3_8B_WEIGHTS,
    TINY,
    TINY_DRAFTER,
    TINY_WEIGHTS,
    resolved,
    row_state,
)


def tiny(**options: Any) -> dj.ResolvedConfig:
    sizes: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4}
    return resolved(dj.ServeConfig(**(sizes | options)))


def test_every_row_of_qwen3_8b_is_the_sum_written_out():
    serve = dj.ServeConfig(max_seq_len=49_152, max_batch_size=16)
    config = resolved(serve, QWEN3_8B, QWEN3_8B_DRAFTER, "gpu")
    assert footprint(config, QWEN3_8B_WEIGHTS) == Footprint(
        target_weights=16_381_470_720,
        drafter_weights=2_097_252_864,
        # 16 rows x (49152 + 16) x 36 layers x K and V x 8 x 128 x 2 B
        kv_arena=16 * 49_168 * 147_456,
        # 5 layers
        context_arena=16 * 49_168 * 20_480,
        # a chunk of 2048 tokens x 5 taps x 4096 x 2 B
        features=2048 * 5 * 4096 * 2,
        # 16 rows x 16 tokens x vocabulary x 4 B
        logits=256 * 151_936 * 4,
        token_state=16 * row_state(151_936) + 4,
    )


def test_a_token_costs_the_layers_of_both_models():
    """Fault 95: 2 x 2 KV heads x 16 x (4 + 2 layers) x 4 B = 1,536 bytes a token and row."""
    one, two = (footprint(tiny(max_seq_len=n), TINY_WEIGHTS) for n in (100, 101))
    grown = (two.kv_arena + two.context_arena) - (one.kv_arena + one.context_arena)
    assert grown == 4 * 1536
    assert two.context_arena - one.context_arena == 4 * 1536 // 3


def test_the_drafters_weights_are_counted():
    """Fault 95: left out, the server ran out of memory."""
    held = footprint(tiny(), TINY_WEIGHTS)
    assert (held.target_weights, held.drafter_weights) == (1000, 500)
    assert held.resident == 1500 + held.kv_arena + held.context_arena + held.token_state
    assert held.buffers == held.features + held.logits
    assert held.total == held.resident + held.buffers == sum(held)


def test_a_drafter_whose_layers_all_slide_keeps_a_window_and_a_block():
    """Fault 98: window 8 of a served length of 4,096."""
    sliding = dataclasses.replace(TINY_DRAFTER, windows=(8, 8), max_position_embeddings=4096)
    long = dataclasses.replace(TINY, max_position_embeddings=4096)
    serve = dj.ServeConfig(max_seq_len=4096, max_batch_size=4)
    held = footprint(resolved(serve, long, sliding), TINY_WEIGHTS)
    assert held.context_arena == 4 * (8 + 4) * 2 * 2 * 2 * 16 * 4
    one_sees_all = dataclasses.replace(sliding, windows=(8, None))
    held = footprint(resolved(serve, long, one_sees_all), TINY_WEIGHTS)
    assert held.context_arena == 4 * (4096 + 4) * 2 * 2 * 2 * 16 * 4


def test_without_a_drafter_there_is_no_context_no_feature_and_one_logit_a_row():
    serve = dj.ServeConfig(max_seq_len=64, max_batch_size=4)
    held = footprint(resolved(serve, drafter=None), TINY_WEIGHTS)
    assert (held.context_arena, held.features, held.logits) == (0, 0, 4 * 97 * 4)
    assert held.kv_arena == 4 * 65 * 2 * 2 * 16 * 4 * 4
    assert held.token_state == 4 * row_state(97, context=False)


def test_the_widest_pass_is_a_chunk_or_a_round_of_all_rows():
    """16 rows x 4 tokens; chunks of the served length, 2048 at the most."""
    assert sizes.widest_pass(tiny(max_batch_size=1)) == 64
    assert sizes.widest_pass(tiny(max_batch_size=17)) == 68
    long = dataclasses.replace(TINY, max_position_embeddings=4096)
    serve = dj.ServeConfig(max_seq_len=4096, max_batch_size=4)
    assert sizes.widest_pass(resolved(serve, long)) == 2048
    assert sizes.widest_pass(resolved(dataclasses.replace(serve, max_num_tokens=100), long)) == 100


def test_rows_that_take_turns_need_logits_for_those_that_decode():
    config = tiny(max_batch_size=32, max_num_tokens=64, allow_token_limited=True)
    assert sizes.logits_rows(config) == 64
    held = footprint(config, TINY_WEIGHTS)
    assert held.logits == 64 * 97 * 4
    assert held.kv_arena == 32 * 68 * 2 * 2 * 16 * 4 * 4


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_arenas_and_features_have_the_dtype_and_logits_are_float32(dtype, size):
    held = footprint(tiny(dtype=dtype), TINY_WEIGHTS)
    assert held.kv_arena == 4 * 68 * 2 * 2 * 16 * 4 * size
    assert held.context_arena == 4 * 68 * 2 * 2 * 16 * 2 * size
    assert held.features == 64 * 2 * 32 * size
    assert held.logits == 16 * 97 * 4


@pytest.mark.parametrize("shards, heads", [(1, 2), (2, 1), (4, 1)])
def test_arenas_are_divided_by_the_heads_that_a_device_really_holds(shards, heads):
    held = footprint(tiny(), TINY_WEIGHTS, shards=shards)
    assert held.kv_arena == 4 * 68 * 2 * heads * 16 * 4 * 4
    assert held.context_arena == 4 * 68 * 2 * heads * 16 * 2 * 4


def test_only_paged_drafter_attention_rounds_the_private_arena_up():
    """64 + 4 positions are 3 pages of 32 or 2 of 48; the target's own row is not rounded."""
    dense = footprint(tiny(), TINY_WEIGHTS)
    for page_size, positions in ((32, 96), (48, 96), (68, 68), (64, 128)):
        paged = footprint(tiny(draft_attention="pallas", page_size=page_size), TINY_WEIGHTS)
        assert paged.context_arena == 4 * positions * 2 * 2 * 16 * 2 * 4
        assert paged.kv_arena == dense.kv_arena


def test_a_pool_takes_the_place_of_the_arenas():
    private = footprint(tiny(kv_layout="paged"), TINY_WEIGHTS)
    assert (private.kv_arena, private.context_arena) == (0, 4 * 68 * 2 * 2 * 16 * 2 * 4)
    shared = footprint(tiny(kv_layout="paged", context_store="pool"), TINY_WEIGHTS)
    assert (shared.kv_arena, shared.context_arena) == (0, 0)


def test_a_page_holds_the_context_where_the_pool_does():
    """Fault 95: 32 tokens x 1,536 bytes, two thirds of it the target's."""
    assert page_bytes(tiny(kv_layout="paged", context_store="pool")) == 32 * 1536
    assert page_bytes(tiny(kv_layout="paged")) == 32 * 1024
    assert page_bytes(tiny(kv_layout="paged", page_size=7), shards=2) == 7 * 512


def test_every_row_has_a_formula_with_its_numbers():
    config = tiny()
    found = formulas(config, TINY_WEIGHTS)
    assert set(found) == set(Footprint._fields)
    assert found["kv_arena"] == "4 rows x 68 positions x 4 layers x 2 x 2 heads x 16 x 4 B"
    assert found["context_arena"] == "4 rows x 68 positions x 2 layers x 2 x 2 heads x 16 x 4 B"
    assert found["features"] == "64 tokens x 2 taps x 32 x 4 B"
    assert found["logits"] == "16 rows x 97 x 4 B"
    assert found["target_weights"] == "250 parameters x 4 B"
    assert "over 2 devices" in formulas(config, TINY_WEIGHTS, shards=2)["kv_arena"]
