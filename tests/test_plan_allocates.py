"""Invariant 5: what an engine allocates is what its plan says, to the byte, on every device.

Engines start with their programs uncompiled, so that only weights and arenas are real.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.arena.sizes import context_arena_bytes, drafter_capacity

ROOT = Path(__file__).resolve().parents[1]
MILLION = 1_048_576

PROGRAM = """
import json, sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
import tiny_engine

target, drafter, found = sys.argv[2], sys.argv[3], []
for dtype in ("float32", "bfloat16"):
    for shards in (1, 2, 4):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("tensor",))
        llm = tiny_engine.start(
            target, drafter, max_seq_len=48, max_batch_size=3, mesh=mesh, dtype=dtype
        )
        held = [0] * shards
        engine = llm._engine
        for leaf in jax.tree.leaves((engine._leaves, engine.state)):
            for shard in leaf.addressable_shards:
                held[shard.device.id] += shard.data.nbytes
        plan = llm.plan
        names = ("target weights", "drafter weights", "KV arena", "context arena", "token state")
        found.append([dtype, shards, held, sum(plan.rows[name] for name in names)])
print(json.dumps([len(jax.devices()), found]))
"""


def test_every_device_holds_what_the_plan_says_in_both_dtypes_and_on_one_two_and_four(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    target = tiny.write_target(tmp_path / "t", **heads)
    drafter = tiny.write_drafter(tmp_path / "d", **heads)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "tests"), str(target), str(drafter)],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    devices, found = json.loads(run.stdout.splitlines()[-1])
    assert devices == 8 and len(found) == 6
    for dtype, shards, held, planned in found:
        assert held == [planned] * shards, (dtype, shards)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target(tmp_path_factory.mktemp("target") / "t")


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_nothing_is_held_twice(target: Path, tmp_path: Path):
    """Fault 97: live arrays are the parameters and the arenas, embedding and head counted once."""
    import gc

    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    llm = tiny_engine.start(
        target, tiny.write_drafter(tmp_path / "d"), max_seq_len=64, max_batch_size=4
    )
    gc.collect()
    held = sum(a.nbytes for a in jax.live_arrays() if id(a) not in before)
    planned = llm.plan.footprint.resident
    assert planned <= held <= 1.05 * planned


@pytest.mark.parametrize("store", ["pool", "arena"])
@pytest.mark.parametrize(
    "size", [{}, {"kv_max_tokens": 1000}, {"kv_max_bytes": 2**20}], ids=["rows", "tokens", "bytes"]
)
def test_a_pool_and_its_table_are_allocated_as_planned(
    target: Path, tmp_path: Path, store: Any, size: dict[str, Any], caplog
):
    """Pools, lengths, table and token state; in the host's memory at most what the batch fills."""
    caplog.set_level("INFO", "dflash_jax")
    llm = tiny_engine.start(
        target,
        tiny.write_drafter(tmp_path / "d"),
        max_seq_len=64,
        max_batch_size=3,
        kv_layout="paged",
        context_store=store,
        page_size=16,
        **size,
    )
    names = ("KV pool", "context arena", "token state")
    state = llm._engine.state
    assert nbytes(state) == sum(llm.plan.rows[name] for name in names)
    pool, arenas = llm.plan.pool, llm.arenas
    assert pool is not None and arenas.context is not None and arenas.kv.pages is not None
    assert arenas.kv.pages.shape == (3, 5)
    assert len(arenas.kv.layers[0].keys) == pool.pages == llm.config.num_pages
    held = nbytes(arenas.kv.layers) + (nbytes(arenas.context.layers) if store == "pool" else 0)
    assert held == pool.nbytes == llm.plan.rows["KV pool"]
    if not size:
        assert pool.pages == 3 * 5
    assert ("the pool is in the host's memory" in caplog.text) == (not size)


@pytest.mark.parametrize("positions", [512, MILLION])
def test_a_million_position_drafter_is_allocated_by_the_served_length(
    target: Path, tmp_path: Path, positions: int
):
    drafter = tiny.write_drafter(tmp_path / "d", max_position_embeddings=positions)
    llm = tiny_engine.start(target, drafter, max_seq_len=96, max_batch_size=2)
    context = llm.arenas.context
    assert context is not None
    assert context.layers[0].keys.shape == (2, 2, 96 + 4, 16)
    assert nbytes(context.layers) == llm.plan.rows["context arena"]
    assert llm.plan.rows["context arena"] == 2 * 2 * 2 * 2 * 100 * 16 * 4


@pytest.mark.parametrize(
    ("served", "positions", "capacity"),
    [(49_152, MILLION, 49_160), (2 * MILLION, MILLION, MILLION + 8), (64, 128, 72)],
)
@pytest.mark.parametrize("attention", ["xla", "pallas", "cudnn"])
@pytest.mark.parametrize(
    ("layout", "store"), [("contiguous", "arena"), ("paged", "arena"), ("paged", "pool")]
)
def test_the_served_length_has_one_source_for_every_attention_and_layout(
    served: int, positions: int, capacity: int, attention: str, layout: str, store: str
):
    """The reference's defect: a path without the attribute asked for 165 GiB at 49,152."""
    long_target = {**tiny.TARGET, "max_position_embeddings": 2 * MILLION}
    drafter = {**tiny.DRAFTER, "max_position_embeddings": positions, "block_size": 8}
    serve = dj.ServeConfig(
        max_seq_len=served,
        max_batch_size=1,
        attention=attention,  # type: ignore[arg-type]
        kv_layout=layout,  # type: ignore[arg-type]
        context_store=store,  # type: ignore[arg-type]
        allow_unqualified=True,
    )
    from dflash_jax.planning.resolve import resolve

    config = resolve(
        serve,
        dj.TargetConfig.from_dict(long_target),
        dj.DrafterConfig.from_dict(drafter),
        engine=False,
    )
    assert drafter_capacity(config) == capacity


def test_a_drafter_of_a_million_positions_plans_by_what_is_served():
    """21.33 x less at 49,152, to two decimals."""
    sizes: dict[str, Any] = {
        "max_batch_size": 32,
        "block_width": 8,
        "num_layers": 5,
        "num_kv_heads": 4,
        "head_dim": 64,
    }
    whole = context_arena_bytes(max_context=MILLION, **sizes)
    served = context_arena_bytes(max_context=49_152, **sizes)
    assert f"{whole / served:.2f}" == "21.33"


# Everybody else who may read how many positions a model was made for, and why.
READS_POSITIONS = {
    "planning/rules.py": "what is beyond them is refused or said",
    "planning/resolve.py": "the default of the served length",
    "planning/account.py": "the end of the search for the largest served length",
    "cli/plan.py": "the last row of the sweep",
    "cli/demo.py": "the demo's served length",
    "training/options.py": "a new drafter's own config",
    "training/real_rounds.py": "the measurement's served length stays below them",
    "weights/gguf.py": "a converted config",
    "serving/admission.py": "up to where a slot's context is whole",
    "serving/drafting.py": "the words of a warning",
}


def test_nothing_outside_the_arenas_sizes_anything_by_a_models_positions():
    package = ROOT / "dflash_jax"
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in ("config", "arena")
        and any(
            "max_position_embeddings" in line.replace("original_max_position_embeddings", "")
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    }
    assert readers <= READS_POSITIONS.keys()
