"""Where the time of a round goes: its parts, compiled one by one and timed in turn.

Each part reads the same arenas, filled half (200 positions at most). In the real round the compiler
joins work across parts, so they need not add up to it; what is left over is said as `rest`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arms import Pair
from measure import medians, race

from dflash_jax.arena.kv import append_kv
from dflash_jax.arena.rows import ArenaRows, KeyValues
from dflash_jax.config import ResolvedConfig
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
from dflash_jax.models.layers import embed_ids, unembed

MOST_FILLED = 200

Call = Callable[[], object]


class Donated:
    """A program that donates its first argument and hands it back first; called over and over."""

    def __init__(self, program: Callable[..., Any], state: Any, *rest: Any):
        self._program, self._state, self._rest = program, state, rest

    def __call__(self) -> None:
        self._state, out = self._program(self._state, *self._rest)
        jax.block_until_ready(out)


def breakdown(
    pair: Pair, configs: Sequence[ResolvedConfig], *, repeats: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds of the plain step and of the widest round, and of their parts."""
    chosen = {"plain step": configs[0]}
    if configs[-1].max_draft_len:
        chosen[f"round, K={configs[-1].max_draft_len}"] = configs[-1]
    return {title: _timed(pair, config, repeats) for title, config in chosen.items()}


def _timed(pair: Pair, config: ResolvedConfig, repeats: int) -> dict[str, Any]:
    target = split_model(pair.target)
    drafter = split_model(pair.drafter if config.drafter is not None else None)
    calls = {"whole": _whole(config, target, drafter), **_target_parts(config, target)}
    if config.drafter is not None:
        calls |= _drafter_parts(config, target, drafter)
    taken = {name: 1e3 * seconds for name, seconds in medians(race(calls, repeats)).items()}
    whole = taken.pop("whole")
    return {"whole_ms": whole, "pieces_ms": {**taken, "rest": whole - sum(taken.values())}}


def filled(config: ResolvedConfig) -> np.ndarray:
    """Lengths of all slots."""
    length = min(MOST_FILLED, config.max_seq_len // 2)
    return np.full((config.max_batch_size,), length, np.int32)


def with_lengths(state: EngineState, lengths: np.ndarray) -> EngineState:
    """The same arenas, said to be filled so far; what lies there (zeros) costs the same to read."""
    kv = state.kv._replace(lengths=jnp.asarray(lengths))
    context = state.context
    if context is not None:
        context = context._replace(lengths=jnp.asarray(lengths))
    return state._replace(kv=kv, context=context)


def filled_state(config: ResolvedConfig) -> EngineState:
    """Arenas of a configuration in the middle of its work."""
    return with_lengths(init_state(config), filled(config))


def _whole(config: ResolvedConfig, target: Model, drafter: Model) -> Call:
    """The real program and the host's read of its report, at the same lengths every time."""
    programs = {program.name: program for program in list_programs(config, target, drafter)}
    compiled = compile_program(programs["round-1-greedy"])

    def step(state: EngineState) -> tuple[EngineState, Any]:
        state = with_lengths(state, filled(config))
        state, report = compiled(target.leaves, drafter.leaves, state, np.array([True]))
        return state, np.asarray(report)

    return Donated(step, filled_state(config))


def _compiled(function: Callable[..., Any], *arguments: Any) -> Call:
    program = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def _target_parts(config: ResolvedConfig, target: Model) -> dict[str, Call]:
    state, width = filled_state(config), config.verify_width
    taps = config.drafter.target_layer_ids if config.drafter is not None else ()
    hidden = jnp.ones((1, width, config.target.hidden_size), jnp.dtype(config.dtype))

    def layers(leaves, kv, ids):
        rows = ArenaRows(kv.layers, None, config.read_piece)
        return target.rebuild(leaves).run(ids, kv.lengths, rows, taps)[:2]

    def head(leaves, hidden):
        return greedy_tokens(target.rebuild(leaves).logits(hidden))

    ids = jnp.zeros((1, width), jnp.int32)
    return {
        f"verify: layers, {width} token(s)": _compiled(layers, target.leaves, state.kv, ids),
        f"verify: head and argmax, {width} row(s)": _compiled(head, target.leaves, hidden),
        "write K/V": _write_kv(config),
    }


def _write_kv(config: ResolvedConfig) -> Call:
    target, width = config.target, config.verify_width
    shape = (1, target.num_key_value_heads, width, target.head_dim)
    rows = KeyValues(*[jnp.ones(shape, jnp.dtype(config.dtype))] * 2)
    slot = jnp.zeros((1,), jnp.int32)

    def write(kv, lengths):
        kv = append_kv(kv._replace(lengths=lengths), slot, [rows] * len(kv.layers), slot + 1)
        return kv, kv.lengths + 0

    kv = filled_state(config).kv
    arguments = (kv, jnp.asarray(filled(config)))
    return Donated(jax.jit(write, donate_argnums=0).lower(*arguments).compile(), *arguments)


def _drafter_parts(config: ResolvedConfig, target: Model, drafter: Model) -> dict[str, Call]:
    model = config.drafter
    assert model is not None
    context = filled_state(config).context
    dtype, width, count = jnp.dtype(config.dtype), config.block_width, config.max_draft_len
    taps = len(model.target_layer_ids) * model.target_hidden_size
    features = jnp.ones((1, config.verify_width, taps), dtype)
    slot, drafted = jnp.zeros((1,), jnp.int32), jnp.ones((1, count, model.hidden_size), dtype)

    def layers(target_leaves, leaves, context):
        ids = jnp.full((1, width), model.mask_token_id, jnp.int32)
        embeddings = embed_ids(target.rebuild(target_leaves).embedding, ids)
        rows = ArenaRows(context.layers, None, config.read_piece)
        return drafter.rebuild(leaves).block_hidden_cached(embeddings, context.lengths, rows)

    def head(target_leaves, hidden):
        table = target.rebuild(target_leaves).head
        return greedy_tokens(unembed(hidden, table, config.target.vocab_size))

    def absorb(context, lengths, leaves, features):
        method = BlockDrafter(drafter.rebuild(leaves), None, count, config.read_piece)  # type: ignore[arg-type]
        context = method.absorb(context._replace(lengths=lengths), slot, features, slot + 1)
        return context, context.lengths + 0

    # Taken from a state of its own: the program donates it.
    begin = (filled_state(config).context, jnp.asarray(filled(config)), drafter.leaves, features)
    taking = jax.jit(absorb, donate_argnums=0).lower(*begin).compile()
    return {
        f"draft: layers, {width} slots": _compiled(layers, target.leaves, drafter.leaves, context),
        f"draft: head and argmax, {count} row(s)": _compiled(head, target.leaves, drafted),
        "context: features to K/V, written": Donated(taking, *begin),
    }
