"""The byte formulas: the reference's worked vectors, and `nbytes` of what is really allocated."""

import json
from pathlib import Path

import jax
import pytest

import tiny
import tiny_engine
from dflash_jax.arena import sizes
from dflash_jax.decoding.programs import init_state
from dflash_jax.errors import ConfigError

GIB = 1024**3

# (batch, context, block, layers, KV heads, head_dim, dtype bytes, paged) -> bytes
VECTORS = [
    ((32, 1_048_576, 8, 5, 4, 64, 2, False), 177_168_752_640),
    ((32, 1_048_576, 8, 5, 4, 64, 2, False), 33 * 5_368_750_080),
    ((32, 8192, 8, 5, 4, 64, 2, False), 1_385_472_000),
    ((32, 8192, 8, 5, 4, 64, 2, False), 33 * 41_984_000),
    ((1, 100, 8, 2, 1, 16, 2, True), 32_768),
    ((1, 100, 8, 2, 1, 16, 2, False), 27_648),
    ((128, 4096, 5, 5, 8, 128, 2, False), 10_834_513_920),
    ((128, 4096, 5, 5, 8, 128, 2, False), 129 * 83_988_480),
    ((3, 120, 8, 1, 1, 16, 2, True), 32_768),
    ((3, 121, 8, 1, 1, 16, 2, True), 40_960),
    ((7, 2048, 16, 5, 8, 128, 4, False), 676_331_520),
    ((7, 2048, 16, 5, 8, 128, 2, False), 338_165_760),
    ((0, 2048, 8, 2, 2, 64, 2, False), 2_105_344),
]


@pytest.mark.parametrize(("numbers", "expected"), VECTORS)
def test_context_bytes_are_those_of_the_reference(numbers: tuple, expected: int):
    batch, context, block, layers, heads, dim, dtype, paged = numbers
    assert expected == sizes.context_arena_bytes(
        max_batch_size=batch,
        max_context=context,
        block_width=block,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype_bytes=dtype,
        paged=paged,
    )


@pytest.mark.parametrize(
    ("numbers", "gib"),
    [
        ((32, 49_152, 8, 5, 4, 64, 2, False), "7.74"),
        ((32, 8192, 8, 5, 4, 64, 2, False), "1.29"),
        ((32, 1_048_576, 8, 5, 4, 64, 2, False), "165.00"),
        ((128, 4096, 5, 5, 8, 128, 2, False), "10.09"),
        ((64, 131_083, 8, 5, 4, 128, 2, False), "81.26"),
        ((64, 131_083, 8, 5, 4, 128, 2, True), "81.27"),
    ],
)
def test_context_sizes_in_gib_are_those_of_the_reference(numbers: tuple, gib: str):
    batch, context, block, layers, heads, dim, dtype, paged = numbers
    size = sizes.context_arena_bytes(
        max_batch_size=batch,
        max_context=context,
        block_width=block,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype_bytes=dtype,
        paged=paged,
    )
    assert f"{size / GIB:.2f}" == gib


def test_a_drafter_made_for_a_million_positions_is_sized_by_the_served_length():
    assert sizes.context_capacity(49_152, 1_048_576, 8) == 49_160
    assert sizes.context_capacity(None, 1_048_576, 8) == 1_048_584
    assert 1_048_584 / 49_160 == pytest.approx(21.33, abs=5e-3)
    assert sizes.context_capacity(256, 64, 4) == 68
    with pytest.raises(ConfigError):
        sizes.context_capacity(None, None, 8)


def test_kv_heads_are_divided_by_the_shards_and_rounded_up():
    sizes_by_shards = [
        sizes.kv_arena_bytes(
            max_batch_size=2,
            capacity=10,
            num_layers=3,
            num_kv_heads=8,
            head_dim=4,
            shards=shards,
        )
        for shards in (1, 2, 3, 8, 16)
    ]
    one_head = 2 * 2 * 3 * 10 * 4 * 2
    assert sizes_by_shards == [heads * one_head for heads in (8, 4, 3, 1, 1)]


def test_pages_round_up_only_where_the_layout_has_pages():
    assert [sizes.context_capacity(n, None, 8, paged=True) for n in (100, 120, 121)] == [
        128,
        128,
        160,
    ]
    assert sizes.context_capacity(100, None, 8, paged=False) == 108
    assert sizes.context_capacity(100, None, 8, paged=True, page_size=64) == 128


@pytest.mark.parametrize("positions", [40, 100_000])
def test_allocated_arenas_have_the_bytes_of_the_formula(tmp_path: Path, positions: int):
    """Fault 90: head_dim is 16 as the configs say, not 32 / 4; invariant 5."""
    target = tiny.write_target(tmp_path / "target")
    drafter = tiny.write_drafter(tmp_path / "drafter", max_position_embeddings=positions)
    config = tiny_engine.resolved(target, drafter, max_seq_len=50, max_batch_size=3)
    state = init_state(config)
    read = {
        name: json.loads((path / "config.json").read_text())
        for name, path in (("target", target), ("drafter", drafter))
    }
    assert all(c["hidden_size"] // c["num_attention_heads"] == 8 for c in read.values())
    context = state.context
    assert context is not None
    assert state.kv.layers[0].keys.shape == (3, 2, 50 + 4, 16)
    assert context.layers[0].keys.shape == (3, 2, min(50, positions) + 4, 16)
    kv_bytes = sizes.kv_arena_bytes(
        max_batch_size=3,
        capacity=sizes.kv_capacity(50, 4),
        num_layers=4,
        num_kv_heads=2,
        head_dim=16,
        dtype_bytes=4,
    )
    context_bytes = sizes.context_arena_bytes(
        max_batch_size=3,
        max_context=min(50, positions),
        block_width=4,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        dtype_bytes=4,
        scratch_rows=0,
    )
    # 2 x KV heads x head_dim x layers x 4 bytes a position, written out once.
    assert kv_bytes == 3 * 54 * (2 * 2 * 16 * 4 * 4)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv.layers)) == kv_bytes
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(context.layers)) == context_bytes
    assert state.kv.lengths.shape == context.lengths.shape == (3,)


def test_without_a_drafter_there_is_no_context_and_one_token_of_slack(tmp_path: Path):
    config = tiny_engine.resolved(
        tiny.write_target(tmp_path / "target"), None, max_seq_len=50, max_batch_size=3
    )
    state = init_state(config)
    assert state.context is None
    assert sizes.drafter_capacity(config) == 0
    assert state.kv.layers[0].keys.shape == (3, 2, 50 + 1, 16)


def test_a_drafter_that_predicts_from_the_anchor_has_blocks_of_k_slots(tmp_path: Path):
    target = tiny.write_target(tmp_path / "target")
    taps = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2], "sample_from_anchor": True}
    drafter = tiny.write_drafter(tmp_path / "drafter", dflash_config=taps)
    config = tiny_engine.resolved(target, drafter, max_seq_len=50, max_batch_size=1)
    assert (config.max_draft_len, config.block_width, config.verify_width) == (4, 4, 5)
    state = init_state(config)
    assert state.context is not None
    assert state.context.layers[0].keys.shape[2] == 50 + 4
    assert state.kv.layers[0].keys.shape[2] == 50 + 5
