"""Rows of `gpu_check.py` that check answers: golden pairs and invariants 1, 2, 6 and 7.

In float32 a difference fails the row; in bfloat16 agreement is counted. The vectors lie with the
tests (`tests/data/golden`), the checks are written out here, so that the lent machine needs neither
pytest nor the shape checker.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dflash_jax import SamplingParams, load_drafter, load_target
from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.decoding.programs import compile_program, init_state, list_programs, split_model
from dflash_jax.planning.resolve import on_platform, resolve
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.output import Output
from dflash_jax.serving.row import Row

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "golden"
NEW_TOKENS = 48
SERVED = 96
PROMPTS = 3


class Case(NamedTuple):
    """What a row runs: a golden pair, the dtype, and how many slots its engines have."""

    pair: str
    dtype: str
    slots: int

    def config(self, *, drafted: bool, max_seq_len: int = SERVED) -> ResolvedConfig:
        """What an engine of this case runs with on this platform."""
        folder = GOLDEN / self.pair
        serve = ServeConfig(max_seq_len=max_seq_len, max_batch_size=self.slots, dtype=self.dtype)
        drafter = DrafterConfig.from_folder(folder / "drafter") if drafted else None
        resolved = resolve(serve, TargetConfig.from_folder(folder / "target"), drafter)
        return on_platform(resolved, serve, jax.default_backend())

    def require(self, exact: bool, what: str) -> None:
        """Fails a float32 row; in bfloat16 the count in its figures has to do."""
        if self.dtype == "float32" and not exact:
            raise AssertionError(what)


class Loaded(NamedTuple):
    """One golden pair on the device: modules, the drafted engine and the reference's vectors."""

    vectors: dict[str, np.ndarray]
    target: Any
    drafter: Any
    drafted: Batch


@functools.lru_cache(maxsize=1)
def load(case: Case) -> Loaded:
    """Rows of one case come one after the other, so the latest is kept."""
    folder = GOLDEN / case.pair
    target = load_target(folder / "target", dtype=case.dtype)
    drafter = load_drafter(folder / "drafter", dtype=case.dtype)
    drafted = Batch(Engine(case.config(drafted=True), target, drafter))
    return Loaded(load_file(folder / "golden.safetensors"), target, drafter, drafted)


def submit(batch: Batch, prompt: np.ndarray, max_tokens: int = NEW_TOKENS) -> Row:
    params = SamplingParams(max_tokens=max_tokens)
    none = frozenset[int]()
    row = Row(
        0,
        prompt=prompt.tolist(),
        params=params,
        seed=0,
        ends=none,
        output=Output(None, params, none),
    )
    batch.submit(row)
    return row


def answers(batch: Batch, vectors: dict[str, np.ndarray]) -> list[Row]:
    """All golden prompts through one engine: fewer slots than requests, so one is used again."""
    rows = [submit(batch, vectors[f"prompt{i}"]) for i in range(PROMPTS)]
    while any(row.finish_reason is None for row in rows):
        batch.step()
    return rows


def agreement(ours: list[list[int]], wanted: list[list[int]]) -> str:
    """How many ids stand before the first difference of each answer, of how many."""
    same = total = 0
    for mine, theirs in zip(ours, wanted, strict=True):
        pairs = enumerate(zip(mine, theirs, strict=False))
        differing = [index for index, (left, right) in pairs if left != right]
        same += differing[0] if differing else min(len(mine), len(theirs))
        total += len(theirs)
    return f"{same} of {total}"


def golden(case: Case) -> dict[str, Any]:
    """Ids and acceptance lengths of the reference."""
    pair = load(case)
    rows = answers(pair.drafted, pair.vectors)
    wanted = [
        pair.vectors[f"output_ids{i}"][len(pair.vectors[f"prompt{i}"]) :][:NEW_TOKENS].tolist()
        for i in range(PROMPTS)
    ]
    ours = [row.token_ids for row in rows]
    # The last round is cut at the 48th token here and not in the reference.
    lengths = [row.stats.acceptance_lengths[:-1] for row in rows]
    trace = [
        pair.vectors[f"acceptance_lengths{i}"][: len(lengths[i])].tolist() for i in range(PROMPTS)
    ]
    case.require(ours == wanted, f"ids differ: {agreement(ours, wanted)} agree")
    case.require(lengths == trace, f"acceptance lengths {lengths}, the reference has {trace}")
    return {"ids": agreement(ours, wanted), "same acceptance lengths": lengths == trace}


def lossless(case: Case) -> dict[str, Any]:
    """Invariant 1: greedy output with the drafter is the output without."""
    pair = load(case)
    alone = Batch(Engine(case.config(drafted=False), pair.target, None))
    plain = [row.token_ids for row in answers(alone, pair.vectors)]
    drafted = [row.token_ids for row in answers(pair.drafted, pair.vectors)]
    case.require(plain == drafted, f"only {agreement(drafted, plain)} ids agree with plain")
    return {"ids as plain decoding": agreement(drafted, plain)}


def context_is_exact(case: Case) -> dict[str, Any]:
    """Invariant 2: after every round the context is a fresh prefill of the committed tokens."""
    pair = load(case)
    row = submit(pair.drafted, pair.vectors["prompt1"], 24)
    worst = 0.0
    while row.finish_reason is None:
        pair.drafted.step()
        if row.finish_reason is None:
            worst = max(worst, _context_error(pair, row.prompt + row.token_ids))
    bound = 1e-5
    case.require(worst <= bound, f"context is {worst:.1e} off, {bound:.0e} x its rms is allowed")
    return {"largest error over the row's rms": worst}


def _context_error(pair: Loaded, committed: list[int]) -> float:
    """Slot 0 against the pairs' own forward pass; the last token is the anchor and not in it."""
    context = pair.drafted.engine.state.context
    assert context is not None
    # The next round may have been dispatched already: rows are only ever appended.
    held, length = int(np.asarray(context.lengths)[0]), len(committed) - 1
    if held < length:
        raise AssertionError(f"context holds {held} rows, {length} are committed")
    fresh = _fresh_context(pair, committed[:-1])
    worst = 0.0
    for layer, wanted in zip(context.layers, fresh, strict=True):
        for mine, theirs in zip(layer, wanted, strict=True):
            ours = np.asarray(mine[0, :, :length], np.float32)
            right = np.asarray(theirs[0, :, :length], np.float32)
            rms = float(np.sqrt(np.mean(right**2)))
            worst = max(worst, float(np.max(np.abs(ours - right))) / max(rms, 1.0))
    return worst


def _fresh_context(pair: Loaded, ids: list[int]) -> Any:
    """One padded length, so that it compiles once; later ids do not reach earlier rows."""
    padded = np.zeros((1, SERVED), np.int32)
    padded[0, : len(ids)] = ids
    return _context_program(pair.target, pair.drafter)(jnp.asarray(padded))


@functools.lru_cache(maxsize=1)
def _context_program(target: Any, drafter: Any) -> Any:
    def run(ids):
        _, features = target.forward(ids, drafter.config.target_layer_ids)
        positions = jnp.arange(SERVED, dtype=jnp.int32)[None, :]
        return drafter.context_kv(features, positions)

    return jax.jit(run)


def no_copies(case: Case) -> dict[str, Any]:
    """Invariant 6: arenas are aliased, and temporaries grow at most as scores and read rows do."""
    pair = load(case)
    models = split_model(pair.target), split_model(pair.drafter)
    base = case.config(drafted=True)
    found, temporaries = {}, []
    for factor in (1, 4):
        config = dataclasses.replace(base, max_seq_len=factor * 4 * SERVED)
        programs = {program.name: program for program in list_programs(config, *models)}
        memory = compile_program(programs[f"round-{case.slots}-greedy"]).memory_analysis()
        if memory is None:
            raise AssertionError("this backend does not say what memory a program needs")
        arenas = _arena_bytes(config)
        temporaries.append(memory.temp_size_in_bytes)
        found[f"alias bytes, {config.max_seq_len} positions"] = memory.alias_size_in_bytes
        found[f"arena bytes, {config.max_seq_len} positions"] = arenas
        case.require(memory.alias_size_in_bytes >= arenas, f"arenas are not aliased: {found}")
    grown, allowed = temporaries[1] - temporaries[0], _allowed_growth(base)
    found |= {"temporaries grew by": grown, "allowed": allowed}
    case.require(grown <= allowed, f"temporaries grew by {grown} bytes, {allowed} allowed")
    return found


def _arena_bytes(config: ResolvedConfig) -> int:
    state = jax.eval_shape(lambda: init_state(config))
    layers = jax.tree.leaves((state.kv.layers, state.context.layers if state.context else ()))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in layers)


def _allowed_growth(config: ResolvedConfig) -> int:
    """1.2 x (scores + K/V rows of one layer) of the added positions."""
    target, rows, added = config.target, config.max_batch_size, 3 * 4 * SERVED
    scores = rows * target.num_attention_heads * config.verify_width * added * 4
    itemsize = jnp.dtype(config.dtype).itemsize
    read = 2 * rows * target.num_key_value_heads * target.head_dim * added * itemsize
    return int(1.2 * (scores + read))


def no_compiles(case: Case) -> dict[str, Any]:
    """Invariant 7: few programs, and none compiled while requests are served."""
    pair = load(case)
    engine = pair.drafted.engine
    before = engine.compiles.count
    for prompt in ("prompt2", "prompt0"):
        row = submit(pair.drafted, pair.vectors[prompt][::-1], 16)
        while row.finish_reason is None:
            pair.drafted.step()
    compiled = engine.compiles.count - before
    if compiled or len(engine.programs) > 24:
        raise AssertionError(f"{compiled} compiles in service, {len(engine.programs)} programs")
    return {"programs": len(engine.programs), "compiles in service": compiled}
