"""The compiled pieces of training: one optimiser step, and the held-out measure.

Pure functions of arrays around `objective.py`. Only the drafter's parameters are in the optimiser.
A step whose loss or gradient is not finite changes nothing and says so. Documents may be divided
over the devices of a mesh; parameters are on each of them. The loop is `trainer.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from dflash_jax.errors import ConfigError
from dflash_jax.models import DFlashDrafter
from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.head import Candidates
from dflash_jax.training.objective import LossSums, block_sums, measure
from dflash_jax.training.optimizer import make_optimizer
from dflash_jax.training.options import TrainOptions
from dflash_jax.weights.match import filled, parameters
from dflash_jax.weights.names import dotted, parameter_path

Params = dict[str, jax.Array]

DATA_AXIS = "data"
"""Mesh axis that the documents of a step are divided over."""


class TrainState(NamedTuple):
    """All that a step changes.

    Attributes:
        params: float32 arrays of the drafter by dotted name.
        opt_state: of the optimiser, for exactly these names.
        step: int32, optimiser steps taken.
    """

    params: Params
    opt_state: Any
    step: jax.Array


class StepReport(NamedTuple):
    """What the log gets from a step: means over all of its documents."""

    loss: Float[Array, ""]
    accepted: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    finite: Bool[Array, ""]


class Shardings(NamedTuple):
    """Where arrays of a step lie: `whole` on every device, `documents` divided by their axis 0."""

    whole: NamedSharding
    documents: NamedSharding


def devices_of(mesh: Mesh | None) -> int:
    """How many devices the documents of a step are divided over.

    Raises:
        ConfigError: the mesh has no axis "data".
    """
    if mesh is None:
        return 1
    if DATA_AXIS not in mesh.shape:
        raise ConfigError(
            f"the mesh has the axes {tuple(mesh.shape)}: training divides documents over an axis "
            f"named {DATA_AXIS!r}"
        )
    return mesh.shape[DATA_AXIS]


def shardings_of(mesh: Mesh) -> Shardings:
    """How a mesh with an axis "data" holds a training step."""
    whole, divided = PartitionSpec(), PartitionSpec(DATA_AXIS)
    return Shardings(NamedSharding(mesh, whole), NamedSharding(mesh, divided))


def drafter_params(drafter: DFlashDrafter) -> Params:
    """The drafter's parameters by dotted name."""
    return {dotted(path): value for path, value in parameters(drafter).items()}


def with_params(abstract: DFlashDrafter, params: Params) -> DFlashDrafter:
    """The drafter of these parameters; the arrays are used as they are."""
    return filled(abstract, {parameter_path(name): value for name, value in params.items()})


def train_step(
    state: TrainState,
    batch: BlockBatch,
    candidates: Candidates | None,
    embed: Float[Array, "r e"],
    head: Float[Array, "r e"],
    *,
    abstract: DFlashDrafter,
    optimizer: optax.GradientTransformation,
    width: int,
    options: TrainOptions,
) -> tuple[TrainState, StepReport]:
    """One optimiser step; with a loss or gradient that is not finite the state stays as it was.

    A batch without an anchor leaves the weights as they are, too.
    """

    def loss_of(params: Params, part: BlockBatch, labels: Any) -> tuple[Array, LossSums]:
        drafter = with_params(abstract, computing(params, options))
        chosen = None if candidates is None else candidates._replace(labels=labels)
        sums = block_sums(drafter, part, chosen, embed, head, width=width, options=options)
        return sums.loss, sums

    labels = None if candidates is None else candidates.labels
    sums, gradients = _accumulated(loss_of, state.params, (batch, labels), options.accumulate)
    # The sum of weights is constant in the parameters, so the mean's gradient is the sum's over it.
    total = jnp.where(sums.weight > 0, sums.weight, 1.0)
    gradients = {name: value / total for name, value in gradients.items()}
    loss, norm = sums.mean_loss, _norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    # Optax mixes Python scalars and arrays; strict promotion is a rule for the model's arithmetic.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
    useful = finite & jnp.any(jnp.asarray(batch.scored))
    new = TrainState(params, opt_state, state.step)  # type: ignore[arg-type]
    kept = jax.tree.map(lambda a, b: jnp.where(useful, a, b), new, state)
    step = state.step + finite.astype(jnp.int32)
    return kept._replace(step=step), StepReport(loss, sums.mean_run, norm, finite)


def computing(params: Params, options: TrainOptions) -> Params:
    """The parameters in the dtype of the pass; gradients flow back to the float32 ones."""
    return {name: value.astype(options.compute_dtype) for name, value in params.items()}


def _accumulated(
    loss_of: Callable[..., tuple[Array, LossSums]], params: Params, data: Any, parts: int
) -> tuple[LossSums, Params]:
    """Sums and gradients over all documents, computed in `parts` of them, one after the other.

    Part i has the documents i, i + parts, …: with documents divided over devices, each device keeps
    its own.
    """
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    if parts == 1:
        (_, sums), gradients = gradient(params, *data)
        return sums, gradients

    def in_parts(array: Array) -> Array:
        array = jnp.asarray(array)
        return jnp.moveaxis(array.reshape(-1, parts, *array.shape[1:]), 1, 0)

    def add(carry: Any, part: Any) -> tuple[Any, None]:
        (_, sums), gradients = gradient(params, *part)
        return jax.tree.map(jnp.add, carry, (sums, gradients)), None

    zero = jnp.zeros((), jnp.float32)
    start = (LossSums(zero, zero, zero, zero), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, start, jax.tree.map(in_parts, data))[0]


def _norm(gradients: Params) -> Float[Array, ""]:
    """Euclidean norm over all leaves."""
    return jnp.sqrt(jnp.sum(jnp.stack([jnp.sum(g * g) for g in gradients.values()])))


def compile_step(
    abstract: DFlashDrafter, options: TrainOptions, shardings: Shardings | None = None
) -> Callable[..., tuple[TrainState, StepReport]]:
    """`train_step` jitted with the state donated; `width` is static."""
    optimizer = make_optimizer(options)

    def step(state, batch, candidates, embed, head, width):
        return train_step(
            state,
            batch,
            candidates,
            embed,
            head,
            abstract=abstract,
            optimizer=optimizer,
            width=width,
            options=options,
        )

    out = None if shardings is None else shardings.whole
    return jax.jit(step, static_argnames="width", donate_argnums=0, out_shardings=out)


def compile_measure(
    abstract: DFlashDrafter, options: TrainOptions, allowed: np.ndarray | None = None
) -> Callable[..., Any]:
    """`measure` jitted, in the dtype of the run's passes; `width` is static."""

    def run(params, batch, embed, head, width):
        drafter = with_params(abstract, computing(params, options))
        ids = None if allowed is None else jnp.asarray(allowed, jnp.int32)
        chunk = options.anchor_chunk
        return measure(drafter, batch, embed, head, width=width, chunk=chunk, allowed=ids)

    return jax.jit(run, static_argnames="width")


def initial_state(drafter: DFlashDrafter, options: TrainOptions) -> TrainState:
    """Step 0: copies of the drafter's parameters and an empty optimiser for exactly those.

    Copies, because a step donates its state: the drafter that was handed in stays usable.
    """
    params = {name: jnp.array(value) for name, value in drafter_params(drafter).items()}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        opt_state = make_optimizer(options).init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def abstract_of(drafter: DFlashDrafter) -> DFlashDrafter:
    """The drafter's shapes without its arrays."""
    graph, state = nnx.split(drafter)
    return nnx.merge(graph, jax.eval_shape(lambda s: s, state))
