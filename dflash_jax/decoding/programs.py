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

from dflash_jax.arena.sizes import row_pages
from dflash_jax.config import ResolvedConfig
from dflash_jax.decoding.draft import BlockDrafter, Drafter
from dflash_jax.decoding.given import GivenDrafter
from dflash_jax.decoding.options import init_counts, init_options
from dflash_jax.decoding.round import Prompt, decode_rounds, prefill_chunk
from dflash_jax.decoding.state import (
    Cleaning,
    EngineState,
    Opening,
    PageCopy,
    Transfer,
    clean_slot,
    copy_page,
    copy_slot,
    init_state,
    open_slot,
)
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
        arguments: abstract leaves of target and drafter (where a pass is in it), state, and what
            varies from call to call.
        out_shardings: of the state and, after a pass, of the report; None without a mesh.
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


def list_programs(config: ResolvedConfig, target: Model, drafter: Model) -> Iterator[Program]:
    """All programs of a configuration.

    `open`, `copy` and `clean` change a slot, `copy-page` a page of a pool; `prefill-T` runs a chunk
    of up to T tokens; `round-B-greedy` and `round-B-general` run the leading B slots with the
    configured drafting, and `plain-B`, where there is drafting, without: a round of rows that may
    or need not draft. `narrow-B`, with `adaptive` alone, verifies the first half of the drafts.
    """
    state = jax.eval_shape(lambda: init_state(config))
    shardings = None if config.mesh is None else state_shardings(config)
    out = shardings
    if config.mesh is not None:
        state = jax.tree.map(_with_sharding, state, shardings)
        out = (shardings, NamedSharding(config.mesh, PartitionSpec()))
    for name, function, argument in _slot_programs(config):
        yield Program(name, function, (state, argument), shardings)
    leaves = (_shapes(target.leaves), _shapes(drafter.leaves), state)
    for size in chunk_buckets(config.max_seq_len, config.max_num_tokens):
        function = _prefill_function(config, target, drafter)
        yield Program(f"prefill-{size}", function, (*leaves, _prompt_shapes(size)), out)
    for rows in row_buckets(config.max_batch_size):
        arguments = (*leaves, jax.ShapeDtypeStruct((rows,), jnp.bool_))
        given = jax.ShapeDtypeStruct((rows, config.verify_width), jnp.int32)
        wide = (*arguments, given) if config.speculation == "suffix" else arguments
        for general in (False, True):
            name = f"round-{rows}-{'general' if general else 'greedy'}"
            function = _round_function(config, target, drafter, general=general)
            yield Program(name, function, wide, out)
        if config.speculation != "none":
            function = _round_function(config, target, drafter, general=True, plain=True)
            yield Program(f"plain-{rows}", function, arguments, out)
        if config.narrow_draft_len:
            function = _round_function(config, target, drafter, general=True, narrow=True)
            if config.speculation == "suffix":
                given = jax.ShapeDtypeStruct((rows, config.narrow_draft_len + 1), jnp.int32)
                wide = (*arguments, given)
            yield Program(f"narrow-{rows}", function, wide, out)


def _slot_programs(config: ResolvedConfig) -> list[tuple[str, Callable[..., Any], Any]]:
    """Name, function and abstract argument of the programs without a model."""
    vocab_size = config.target.vocab_size
    count: Any = jax.ShapeDtypeStruct((), jnp.int32)
    flag: Any = jax.ShapeDtypeStruct((), jnp.bool_)
    options, counts = jax.eval_shape(lambda: (init_options(1), init_counts(1, vocab_size)))
    paged = config.kv_layout == "paged"
    pages: Any = jax.ShapeDtypeStruct((row_pages(config),), jnp.int32) if paged else None
    opening = Opening(count, count, count, count, flag, options, counts, pages)
    transfer = Transfer(count, count, count, count, flag)
    programs = [
        ("open", open_slot, opening),
        ("copy", copy_slot, transfer),
        ("clean", clean_slot, Cleaning(count, pages)),
    ]
    return [*programs, ("copy-page", copy_page, PageCopy(count, count))] if paged else programs


def compile_program(program: Program) -> jax.stages.Compiled:
    """Compiles ahead of time with the state donated, so that arenas are updated in place.

    The state is the last argument but those that vary from call to call: found by its type.
    """
    state = next(i for i, a in enumerate(program.arguments) if isinstance(a, EngineState))
    jitted = jax.jit(program.function, donate_argnums=(state,), out_shardings=program.out_shardings)
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
            last=jnp.zeros((1,), jnp.bool_),
            anchors=jnp.zeros((1,), jnp.int32),
        )
    )


def _method(
    config: ResolvedConfig,
    target: Target,
    drafter: DFlashDrafter | None,
    state: EngineState,
    *,
    narrow: bool = False,
) -> Drafter | None:
    if drafter is None or config.speculation != "dflash":
        return None
    table = state.kv.pages if config.context_store == "pool" else None
    full = config.max_draft_len
    count = config.narrow_draft_len if narrow else full
    return BlockDrafter(drafter, target, count, config.read_piece, table, full)


def _prefill_function(config: ResolvedConfig, target: Model, drafter: Model) -> Callable[..., Any]:
    def prefill(target_leaves, drafter_leaves, state, prompt):
        model = target.rebuild(target_leaves)
        method = _method(config, model, drafter.rebuild(drafter_leaves), state)
        piece = config.read_piece or PREFILL_PIECE
        return prefill_chunk(model, method, state, prompt, piece=piece)

    return prefill


def _round_function(
    config: ResolvedConfig,
    target: Model,
    drafter: Model,
    *,
    general: bool,
    plain: bool = False,
    narrow: bool = False,
) -> Callable[..., Any]:
    def round_(target_leaves, drafter_leaves, state, active, given=None):
        model = target.rebuild(target_leaves)
        if given is None:
            own = drafter.rebuild(drafter_leaves)
            method = _method(config, model, own, state, narrow=narrow)
        else:
            method = GivenDrafter(given, active)
        return decode_rounds(
            model,
            method,
            state,
            active,
            rounds=config.rounds_per_step,
            general=general,
            piece=config.read_piece,
            plain=plain,
        )

    return round_
