"""Rows of `gpu_check.py` that time Qwen3-8B shapes: plain step, draft, verify and round.

Weights are random and made on the device, so acceptance means nothing here and a speed-up is only a
projection. Arenas hold zeros and are said to be filled, which costs the same to read.
"""

import functools
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import seconds_of

from dflash_jax.arena.rows import ArenaRows
from dflash_jax.config import DrafterConfig, ResolvedConfig, ServeConfig, TargetConfig
from dflash_jax.decoding.draft import BlockDrafter
from dflash_jax.decoding.programs import (
    Model,
    compile_program,
    init_state,
    list_programs,
    split_model,
)
from dflash_jax.decoding.round import EngineState
from dflash_jax.decoding.sampling import greedy_tokens
from dflash_jax.models import build_drafter, build_target
from dflash_jax.planning.resolve import on_platform, resolve

ACCEPTANCE_LENGTHS = (3.0, 5.0, 6.5)
ROOM = 64
REPEATS = 12


class Shapes(NamedTuple):
    """One pair of configs, as a checkpoint's `config.json` would say them."""

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]


_COMMON = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
}
_DFLASH = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
QWEN3_8B = Shapes(
    "Qwen3-8B",
    {**_COMMON, "num_hidden_layers": 36, "tie_word_embeddings": False},
    {
        **_COMMON,
        "num_hidden_layers": 5,
        "num_target_layers": 36,
        "block_size": 16,
        "dflash_config": _DFLASH,
    },
)

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
TINY = Shapes(
    "tiny",
    {**QWEN3_8B.target, **_SMALL, "num_hidden_layers": 3},
    {
        **QWEN3_8B.drafter,
        **_SMALL,
        "num_hidden_layers": 1,
        "num_target_layers": 3,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 2]},
    },
)


class Rates(NamedTuple):
    """What the roofline stands on, measured on this device: bytes and operations a second."""

    bytes_per_second: float
    operations_per_second: float


class Models(NamedTuple):
    """A pair with random weights, and its parsed configs."""

    target_config: TargetConfig
    drafter_config: DrafterConfig
    target: Model
    drafter: Model


@functools.lru_cache(maxsize=1)
def build(name: str, dtype: str) -> Models:
    """Random weights, made on the device one array after the other."""
    shapes = QWEN3_8B if name == QWEN3_8B.name else TINY
    target = TargetConfig.from_dict(shapes.target)
    drafter = DrafterConfig.from_dict(shapes.drafter)
    kind, rngs = jnp.dtype(dtype), nnx.Rngs(0)
    return Models(
        target,
        drafter,
        split_model(build_target(target, dtype=kind, rngs=rngs)),
        split_model(build_drafter(drafter, dtype=kind, rngs=rngs)),
    )


def weights(name: str, dtype: str) -> dict[str, Any]:
    """Row: bytes of the pair's weights."""
    models = build(name, dtype)
    leaves = jax.block_until_ready((models.target.leaves, models.drafter.leaves))
    sizes = [sum(leaf.nbytes for leaf in part) for part in leaves]
    return {"target GB": sizes[0] / 1e9, "drafter GB": sizes[1] / 1e9}


def settings(models: Models, dtype: str, rows: int, context: int, *, drafted: bool):
    """Arenas that hold the context and a few rounds more."""
    serve = ServeConfig(max_seq_len=context + ROOM, max_batch_size=rows, dtype=dtype)
    resolved = resolve(serve, models.target_config, models.drafter_config if drafted else None)
    return on_platform(resolved, serve, jax.default_backend())


def timings(name: str, dtype: str, rows: int, context: int, rates: Rates | None) -> dict[str, Any]:
    """Row: milliseconds of every pass, over its roofline, and the projection."""
    models = build(name, dtype)
    calls = _calls(models, dtype, rows, context)
    with ThreadPoolExecutor(len(calls)) as pool:  # compilers run side by side
        ready = dict(zip(calls, pool.map(lambda make: make(), calls.values()), strict=True))
    milliseconds = {}
    for what in list(ready):
        milliseconds[what] = 1e3 * _median(ready.pop(what))  # its arenas go with it
    work = _work(models, settings(models, dtype, rows, context, drafted=True), rows, context)
    found: dict[str, Any] = {f"{what} ms": taken for what, taken in milliseconds.items()}
    if rates is not None:
        for what, (nbytes, operations) in work.items():
            needed = max(nbytes / rates.bytes_per_second, operations / rates.operations_per_second)
            found[f"{what} roofline ms"] = 1e3 * needed
            found[f"{what} over roofline"] = milliseconds[what] / (1e3 * needed)
    found["round over plain"] = milliseconds["round"] / milliseconds["plain"]
    for length in ACCEPTANCE_LENGTHS:
        key = f"speed-up projected at acceptance length {length} (random weights)"
        found[key] = length * milliseconds["plain"] / milliseconds["round"]
    return found


def _median(call: Callable[[], object]) -> float:
    call()
    call()
    return statistics.median(seconds_of(call) for _ in range(REPEATS))


def _calls(
    models: Models, dtype: str, rows: int, context: int
) -> dict[str, Callable[[], Callable[[], object]]]:
    """How to compile every pass."""
    drafted = settings(models, dtype, rows, context, drafted=True)
    plain = settings(models, dtype, rows, context, drafted=False)
    none = split_model(None)
    return {
        "plain": lambda: _round(plain, models.target, none, rows, context),
        "draft": lambda: _draft(drafted, models, rows, context),
        "verify": lambda: _verify(drafted, models, rows, context),
        "round": lambda: _round(drafted, models.target, models.drafter, rows, context),
    }


def _at(state: EngineState, rows: int, context: int) -> EngineState:
    lengths = np.full((rows,), context, np.int32)
    held = state.context
    if held is not None:
        held = held._replace(lengths=jax.device_put(lengths))
    return state._replace(kv=state.kv._replace(lengths=jax.device_put(lengths)), context=held)


def _round(
    config: ResolvedConfig, target: Model, drafter: Model, rows: int, context: int
) -> Callable[[], object]:
    """The engine's own program, its report read by the host, from the same length every time."""
    programs = {program.name: program for program in list_programs(config, target, drafter)}
    program = compile_program(programs[f"round-{rows}-greedy"])
    held = [jax.jit(lambda: init_state(config))()]
    active = np.ones((rows,), bool)

    def call() -> None:
        state = _at(held[0], rows, context)
        held[0], report = program(target.leaves, drafter.leaves, state, active)
        np.asarray(report)

    return call


def _draft(config: ResolvedConfig, models: Models, rows: int, context: int) -> Callable[[], object]:
    state = _at(jax.jit(lambda: init_state(config))(), rows, context)
    slots = jnp.arange(rows, dtype=jnp.int32)

    def draft(target_leaves, drafter_leaves, arena, anchors):
        target = models.target.rebuild(target_leaves)
        model = models.drafter.rebuild(drafter_leaves)
        method = BlockDrafter(model, target, config.max_draft_len, config.read_piece)
        return method.propose(arena, slots, anchors, None).tokens

    arguments = (models.target.leaves, models.drafter.leaves, state.context, state.tokens.anchors)
    return _reading(draft, *arguments)


def _verify(
    config: ResolvedConfig, models: Models, rows: int, context: int
) -> Callable[[], object]:
    kv = _at(jax.jit(lambda: init_state(config))(), rows, context).kv
    ids = jnp.zeros((rows, config.verify_width), jnp.int32)

    def verify(leaves, kv, ids):
        target = models.target.rebuild(leaves)
        cache = ArenaRows(kv.layers, None, config.read_piece)
        taps = models.drafter_config.target_layer_ids
        hidden, features, _ = target.run(ids, kv.lengths, cache, taps)
        return greedy_tokens(target.logits(hidden)), features

    return _reading(verify, models.target.leaves, kv, ids)


def _reading(function: Callable[..., Any], *arguments: Any) -> Callable[[], object]:
    program = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def _work(
    models: Models, config: ResolvedConfig, rows: int, context: int
) -> dict[str, tuple[float, float]]:
    """(bytes, operations) that every pass cannot do without: weights once, held K/V, products."""
    target, drafter = models.target_config, models.drafter_config
    item = jnp.dtype(config.dtype).itemsize
    table = target.vocab_size * target.hidden_size
    stack = sum(leaf.size for leaf in models.target.leaves) - table * (
        1 if target.tie_word_embeddings else 2
    )
    draft_stack = sum(leaf.size for leaf in models.drafter.leaves)

    def kv_bytes(one: TargetConfig | DrafterConfig) -> float:
        kept = 2 * one.num_hidden_layers * one.num_key_value_heads * one.head_dim
        return rows * context * kept * item

    def products(size: float, tokens: int) -> float:
        return 2.0 * size * rows * tokens

    def step(tokens: int) -> tuple[float, float]:
        read = (stack + table) * item + kv_bytes(target)
        return read, products(stack + table, tokens)

    verify = step(config.verify_width)
    draft = (
        (draft_stack + table) * item + kv_bytes(drafter),
        products(draft_stack, config.block_width) + products(table, config.max_draft_len),
    )
    both = (verify[0] + draft[0], verify[1] + draft[1])
    return {"plain": step(1), "draft": draft, "verify": verify, "round": both}
