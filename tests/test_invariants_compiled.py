"""Invariants 6 and 7 on the compiled programs themselves, and attention against a dense reference.

Memory figures come from `memory_analysis()` of programs lowered from shapes alone; masks are held
to softmax written out in NumPy.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.config import ResolvedConfig
from dflash_jax.decoding import programs
from dflash_jax.decoding.draft import BlockDrafter
from dflash_jax.decoding.round import decode_round
from dflash_jax.models.attention import CachedRows, Part, attend, pass_mask

ROWS, CHUNK, C = 4, 64, 512


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny.write_two_layers(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> tuple[programs.Model, programs.Model]:
    target, drafter = folders
    return (
        programs.split_model(dj.load_target(target)),
        programs.split_model(dj.load_drafter(drafter)),
    )


def config_for(folders: tuple[Path, Path], length: int, read_piece: int | None) -> ResolvedConfig:
    return tiny_engine.resolved(
        *folders,
        read_piece=read_piece,
        max_seq_len=length,
        max_batch_size=ROWS,
        max_num_tokens=CHUNK,
    )


def listed(config: ResolvedConfig, models: Any) -> dict[str, programs.Program]:
    return {program.name: program for program in programs.list_programs(config, *models)}


def arena_bytes(config: ResolvedConfig) -> int:
    state = jax.eval_shape(lambda: programs.init_state(config))
    assert state.context is not None
    layers = (state.kv.layers, state.context.layers)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))


def one_layer_growth(config: ResolvedConfig, name: str, extra: int) -> int:
    """Scores and K/V rows of one target layer over `extra` more positions, in bytes."""
    target = config.target
    rows, width = (1, CHUNK) if name.startswith("prefill") else (ROWS, config.verify_width)
    scores = rows * target.num_attention_heads * width * extra * 4
    return scores + 2 * rows * target.num_key_value_heads * target.head_dim * extra * 4


@pytest.mark.parametrize("read_piece", [256, None])
@pytest.mark.parametrize("name", [f"prefill-{CHUNK}", f"round-{ROWS}-greedy"])
def test_arenas_are_updated_in_place_and_temporaries_grow_with_one_layers_rows(
    folders, models, read_piece: int | None, name: str
):
    """Invariant 6. `read_piece=None` is the path of a GPU, compiled for this CPU."""
    memory: dict[int, Any] = {}
    for length in (C, 4 * C):
        config = config_for(folders, length, read_piece)
        compiled = programs.compile_program(listed(config, models)[name])
        memory[length] = compiled.memory_analysis()
        assert memory[length] is not None
        assert memory[length].alias_size_in_bytes >= arena_bytes(config)
    growth = memory[4 * C].temp_size_in_bytes - memory[C].temp_size_in_bytes
    config = config_for(folders, C, read_piece)
    assert growth <= 1.2 * one_layer_growth(config, name, 3 * C)
    if read_piece is not None:
        # A loop over pieces reads the same amount at a time, whatever the capacity.
        assert growth <= 0.1 * one_layer_growth(config, name, 3 * C)


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path]) -> dj.LLM:
    """The one engine of this file that starts as a user's does: compiled ahead and warmed up."""
    return dj.LLM(*folders, max_seq_len=40, max_batch_size=2)


def test_every_program_of_an_engine_aliases_its_arenas(served: dj.LLM):
    arenas: Any = served.arenas
    size = sum(leaf.nbytes for arena in arenas for leaf in jax.tree.leaves(arena.layers))
    assert set(served.programs) == {
        *("open", "copy", "clean"),
        "prefill-32",
        "prefill-40",
        *(f"round-{rows}-{kind}" for rows in (1, 2) for kind in ("greedy", "general")),
        *(f"plain-{rows}" for rows in (1, 2)),
    }
    for name, program in served.programs.items():
        memory: Any = program.memory_analysis()
        assert memory.alias_size_in_bytes >= size, name


def test_warm_up_leaves_all_lengths_at_zero_and_donated_arenas_are_gone(served: dj.LLM):
    """Invariant 8; fault 103: what a call donated is deleted, not copied."""
    arenas = served.arenas
    assert arenas.context is not None
    if int(np.sum(np.asarray(arenas.kv.lengths))) == 0:
        assert arenas.context.lengths.tolist() == [0, 0]
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(arenas.kv.layers)}
    served.generate([1, 2, 3], dj.SamplingParams(max_tokens=4))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arenas))
    after = jax.tree.leaves(served.arenas.kv.layers)
    assert {leaf.unsafe_buffer_pointer() for leaf in after} == pointers


def test_nothing_compiles_in_service_whatever_is_asked(served: dj.LLM):
    """Invariant 7; fault 105. The counter counts the whole process, so compiles here are ours."""
    before = served.compiles_in_service
    first = dj.SamplingParams(max_tokens=9)
    served.generate([[1, 2, 3], [4] * 33, [5]], first)
    others = [
        dj.SamplingParams(max_tokens=17, temperature=0.7, seed=3),
        dj.SamplingParams(max_tokens=5, stop_token_ids=[3, 4]),
        dj.SamplingParams(max_tokens=11, temperature=2.0),
        dj.SamplingParams(max_tokens=1, ignore_eos=True),
        dj.SamplingParams(max_tokens=400),
        dj.SamplingParams(max_tokens=3, top_k=3, temperature=1.0, logprobs=4, n=2),
        dj.SamplingParams(max_tokens=9, logit_bias={3: -5.0}, repetition_penalty=1.2, min_tokens=2),
        dj.SamplingParams(max_tokens=9, speculate=False),
    ]
    prompts = [[7] * 20, [8] * 31, [9], [10] * 39, [1], [2], [8] * 25, [7] * 25]
    done = served.generate(prompts, others)
    assert [d.finish_reason == "abort" for d in done] == [False] * 4 + [True] + [False] * 3
    row = served.submit([7] * 21, first)[0]
    served.step()
    served.cancel(row)
    assert served.compiles_in_service == before
    # The counter does count: an eager helper in the way would be seen.
    jnp.arange(int(before) + 17, dtype=jnp.int32).sum().block_until_ready()
    assert served.compiles_in_service > before


def test_a_default_configuration_has_at_most_24_programs(folders, models):
    config = tiny_engine.resolved(*folders)
    assert (config.max_batch_size, config.max_seq_len) == (16, 4096)
    names = [program.name for program in programs.list_programs(config, *models)]
    assert len(names) == len(set(names)) <= 24
    narrow = tiny_engine.resolved(*folders, adaptive=True)
    more = [program.name for program in programs.list_programs(narrow, *models)]
    assert set(more) - set(names) == {f"narrow-{rows}" for rows in (1, 2, 4, 8, 16)}
    for rows in (1, 2, 16):
        assert {f"round-{rows}-greedy", f"round-{rows}-general", f"plain-{rows}"} <= set(names)


def lowered_sizes(tmp_path: Path, hidden: int) -> dict[str, int]:
    changes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    taps = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 1]}
    target = tiny.write_target(tmp_path / f"target{hidden}", **changes)
    drafter = tiny.write_drafter(
        tmp_path / f"drafter{hidden}", num_target_layers=2, dflash_config=taps, **changes
    )
    config = tiny_engine.resolved(target, drafter, max_seq_len=64, max_batch_size=2)
    pair = (
        programs.split_model(dj.load_target(target)),
        programs.split_model(dj.load_drafter(drafter)),
    )
    return {
        name: len(jax.jit(program.function).lower(*program.arguments).as_text())
        for name, program in listed(config, pair).items()
        if name in ("prefill-64", "round-2-greedy", "round-2-general")
    }


def test_no_weight_is_a_constant_of_a_program(tmp_path: Path):
    """Fault 106: 16 times the weights, the same program text."""
    small, large = lowered_sizes(tmp_path, 32), lowered_sizes(tmp_path, 128)
    assert len(small) == 3
    for name, size in small.items():
        assert abs(large[name] - size) < 0.02 * size
        assert size < 400_000


def test_no_intermediate_of_a_padded_batch_is_nan(folders):
    """Fault 109: idle rows see no cached key; every primitive is checked, one by one."""
    target, drafter = dj.load_target(folders[0]), dj.load_drafter(folders[1])
    config = config_for(folders, 20, 8)
    method = BlockDrafter(drafter, target, config.max_draft_len, 8)
    state = programs.init_state(config)
    tokens = state.tokens._replace(
        remaining=jnp.full((ROWS,), 9, jnp.int32), drafting=jnp.ones((ROWS,), bool)
    )
    active = jnp.array([False, True, False, False])
    with jax.debug_nans(True), jax.disable_jit():
        state, report = decode_round(
            target, method, state._replace(tokens=tokens), active, general=True, piece=8
        )
    assert report.shape[0] == ROWS
    assert report[:, 0].tolist() == [0, config.max_draft_len, 0, 0]
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.kv.layers))


@dataclasses.dataclass(frozen=True)
class Case:
    """What attention is asked for: `slot` the first arena row, 3 rows of lengths 0, 5 and 19."""

    causal: bool = True
    window: int | None = None
    slot: int | None = None
    width: int = 4


CASES = [
    Case(),
    Case(causal=False),
    Case(window=3),
    Case(window=3, causal=False),
    Case(window=6, slot=2),
    Case(slot=1, width=1),
    Case(window=1),
    Case(window=64, causal=False, slot=2),
]
LENGTHS, CAPACITY, HEADS, KV_HEADS, DIM = (0, 5, 19), 23, 4, 2, 8


def dense(case: Case, q: Any, own: Any, arena: Any) -> np.ndarray:
    """softmax over absolute positions: query at n + i sees what causality and window allow."""
    out = np.zeros(q.shape)
    for b, n in enumerate(LENGTHS):
        row = b + (case.slot or 0)
        keys = np.concatenate([arena[0][row, :, :n], own[0][b]], axis=1).astype(np.float64)
        values = np.concatenate([arena[1][row, :, :n], own[1][b]], axis=1).astype(np.float64)
        for i in range(case.width):
            at, places = n + i, np.arange(n + case.width)
            seen = places <= at if case.causal else np.ones(len(places), bool)
            if case.window is not None:
                seen &= np.abs(at - places) < case.window
            for h in range(HEADS):
                k = h // (HEADS // KV_HEADS)
                scores = np.where(seen, keys[k] @ q[b, i, h] / np.sqrt(DIM), -np.inf)
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights / weights.sum() @ values[k]
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_dense_softmax_however_the_arena_is_read(case: Case):
    """Fault 107; also that both ways of reading an arena agree. Dead rows hold 1e4."""
    rng = np.random.default_rng(0)
    b, slots = len(LENGTHS), 5
    q = rng.standard_normal((b, case.width, HEADS, DIM)).astype(np.float32)
    own = rng.standard_normal((2, b, KV_HEADS, case.width, DIM)).astype(np.float32)
    arena = rng.standard_normal((2, slots, KV_HEADS, CAPACITY, DIM)).astype(np.float32)
    for row, length in enumerate(LENGTHS):
        arena[:, row + (case.slot or 0), :, length:] = 1e4
    lengths = jnp.array(LENGTHS, jnp.int32)
    positions = lengths[:, None] + jnp.arange(case.width, dtype=jnp.int32)[None]
    wanted = dense(case, q, own, arena)
    mask = pass_mask(case.width, causal=case.causal, window=case.window)
    for piece in (None, 4, 7, 23, 64):
        cached = CachedRows(
            jnp.asarray(arena[0]),
            jnp.asarray(arena[1]),
            lengths,
            positions,
            None if case.slot is None else jnp.int32(case.slot),
            case.window,
            piece,
        )
        part = Part(jnp.asarray(own[0]), jnp.asarray(own[1]), mask)
        found = jax.jit(lambda q, part=part, cached=cached: attend(q, part, cached))(jnp.asarray(q))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=f"piece {piece}")
