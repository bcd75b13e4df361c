"""Every compiled program of an engine: its name, its function and its abstract arguments.

Models enter as flat tuples of parameter leaves over a closed-over structure, so that a call costs
no pytree work and no weight becomes a constant. State is donated. Nothing here allocates: programs
are lowered from shapes alone.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.arena.context import init_context_arena
from dflash_jax.arena.kv import init_kv_arena
from dflash_jax.config import ResolvedConfig
from dflash_jax.decoding.draft import BlockDrafter, Drafter
from dflash_jax.decoding.given import GivenDrafter
from dflash_jax.decoding.round import EngineState, Prompt, TokenState, decode_round, prefill_chunk
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.planning.buckets import chunk_buckets, row_buckets
from dflash_jax.weights.names import MESH_AXES

Leaves = tuple[jax.Array | jax.ShapeDtypeStruct, ...]

# Prefill never scores a chunk against a whole row at once: that array would be the largest of all,
# and reading a loop's trip count back at every layer costs nothing beside a chunk.
PREFILL_PIECE = 512
TENSOR_AXIS = MESH_AXES["k"]


class Model(NamedTuple):
    """A module split once: leaves go into calls, `rebuild(leaves)` makes the module in a trace."""

    leaves: Leaves
    rebuild: Callable[[tuple[jax.Array, ...]], Any]


class Program(NamedTuple):
    """One program, ready to lower.

    Attributes:
        arguments: abstract target leaves, drafter leaves, state, and what varies from call to call.
        out_shardings: of the state and of the report; None without a mesh.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    out_shardings: Any


def split_model(module: Target | DFlashDrafter | None) -> Model:
    """Flat leaves of a module and how to put them back; nothing for None."""
    if module is None:
        return Model((), lambda leaves: None)
    graph, params = nnx.split(module)
    leaves, tree = jax.tree.flatten(params)

    def rebuild(flat: tuple[jax.Array, ...]) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(tree, flat))

    return Model(tuple(leaves), rebuild)


def init_state(config: ResolvedConfig) -> EngineState:
    """Arenas and token state of an engine, zero-filled, all lengths 0."""
    slots = config.max_batch_size
    dtype = jnp.dtype(config.dtype)
    return EngineState(
        kv=init_kv_arena(config, dtype),
        context=init_context_arena(config, dtype) if config.speculation == "dflash" else None,
        tokens=TokenState(
            anchors=jnp.zeros((slots,), jnp.int32),
            temperatures=jnp.zeros((slots,), jnp.float32),
            seeds=jnp.zeros((slots,), jnp.uint32),
        ),
    )


def list_programs(config: ResolvedConfig, target: Model, drafter: Model) -> Iterator[Program]:
    """All programs of a configuration: `prefill-T`, `round-B-greedy|sampled`, `given-B-…`.

    A `given` round verifies drafts of the host; where the host drafts, `round` is plain decoding.
    """
    state = jax.eval_shape(lambda: init_state(config))
    out = None
    if config.mesh is not None:
        out = (state_shardings(config), NamedSharding(config.mesh, PartitionSpec()))
        state = jax.tree.map(_with_sharding, state, out[0])
    leaves = (_shapes(target.leaves), _shapes(drafter.leaves), state)
    for size in chunk_buckets(config.max_seq_len, config.max_num_tokens):
        yield Program(
            f"prefill-{size}",
            _prefill_function(config, target, drafter),
            (*leaves, _prompt_shapes(size)),
            out,
        )
    for rows in row_buckets(config.max_batch_size):
        active = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        given = jax.ShapeDtypeStruct((rows, config.verify_width), jnp.int32)
        for sampled in (False, True):
            name = f"{rows}-{'sampled' if sampled else 'greedy'}"
            function = _round_function(config, target, drafter, sampled)
            yield Program(f"round-{name}", function, (*leaves, active), out)
            if config.speculation == "suffix":
                yield Program(f"given-{name}", function, (*leaves, active, given), out)


def compile_program(program: Program) -> jax.stages.Compiled:
    """Compiles ahead of time with the state donated, so that arenas are updated in place."""
    jitted = jax.jit(program.function, donate_argnums=(2,), out_shardings=program.out_shardings)
    return jitted.lower(*program.arguments).compile()


def state_shardings(config: ResolvedConfig) -> EngineState:
    """How a mesh divides the state: arenas by KV heads over the axis "tensor", the rest not."""
    axis = TENSOR_AXIS if TENSOR_AXIS in config.mesh.shape else None

    def sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = PartitionSpec(None, axis) if leaf.ndim == 4 else PartitionSpec()
        return NamedSharding(config.mesh, spec)

    return jax.tree.map(sharding, jax.eval_shape(lambda: init_state(config)))


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _shapes(leaves: Leaves) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
        for leaf in leaves
    )


def _prompt_shapes(size: int) -> Prompt:
    return jax.eval_shape(
        lambda: Prompt(
            slots=jnp.zeros((1,), jnp.int32),
            ids=jnp.zeros((1, size), jnp.int32),
            counts=jnp.zeros((1,), jnp.int32),
            fresh=jnp.zeros((1,), jnp.bool_),
            temperatures=jnp.zeros((1,), jnp.float32),
            seeds=jnp.zeros((1,), jnp.uint32),
        )
    )


def _method(
    config: ResolvedConfig, target: Target, drafter: DFlashDrafter | None
) -> Drafter | None:
    if drafter is None or config.speculation != "dflash":
        return None
    return BlockDrafter(drafter, target, config.max_draft_len, config.read_piece)


def _prefill_function(config: ResolvedConfig, target: Model, drafter: Model) -> Callable[..., Any]:
    def prefill(target_leaves, drafter_leaves, state, prompt):
        model = target.rebuild(target_leaves)
        method = _method(config, model, drafter.rebuild(drafter_leaves))
        piece = config.read_piece or PREFILL_PIECE
        return prefill_chunk(model, method, state, prompt, piece=piece)

    return prefill


def _round_function(
    config: ResolvedConfig, target: Model, drafter: Model, sampled: bool
) -> Callable[..., Any]:
    def round_(target_leaves, drafter_leaves, state, active, given=None):
        model = target.rebuild(target_leaves)
        if given is None:
            method = _method(config, model, drafter.rebuild(drafter_leaves))
        else:
            method = GivenDrafter(given, active)
        return decode_round(model, method, state, active, sampled=sampled, piece=config.read_piece)

    return round_
