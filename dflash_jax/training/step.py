"""The compiled pieces of training: one optimiser step, and the held-out measure.

Pure functions of arrays around `objective.py`. Only the drafter's parameters are in the optimiser.
A step whose loss or gradient is not finite changes nothing and says so. The loop is `trainer.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from dflash_jax.models import DFlashDrafter
from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.head import Candidates
from dflash_jax.training.objective import block_loss, measure
from dflash_jax.training.options import TrainOptions
from dflash_jax.weights.match import filled, parameters
from dflash_jax.weights.names import dotted, parameter_path

Params = dict[str, jax.Array]


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
    """What the log gets from a step."""

    loss: Float[Array, ""]
    accepted: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    finite: Bool[Array, ""]


def drafter_params(drafter: DFlashDrafter) -> Params:
    """The drafter's parameters by dotted name."""
    return {dotted(path): value for path, value in parameters(drafter).items()}


def with_params(abstract: DFlashDrafter, params: Params) -> DFlashDrafter:
    """The drafter of these parameters; the arrays are used as they are."""
    return filled(abstract, {parameter_path(name): value for name, value in params.items()})


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """Clipping, then AdamW, or Muon for matrices with AdamW for the rest; warm-up and cosine."""
    warmup = max(int(options.warmup * options.steps), 1)

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(options.steps, warmup + 1))

    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "adamw":
        rule = optax.adamw(schedule(rate), b1=0.9, b2=0.95, weight_decay=decay)
    else:
        rule = optax.contrib.muon(
            schedule(rate),
            weight_decay=decay,
            adam_b2=0.95,
            adam_weight_decay=decay,
            # Updates of the size that AdamW's have (Liu et al. 2025, 2502.16982), so that both
            # rules take the same rate.
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(options.clip), rule)


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

    def objective(params: Params):
        drafter = with_params(abstract, params)
        return block_loss(drafter, batch, candidates, embed, head, width=width, options=options)

    (loss, accepted), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
    norm = _norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    # Optax mixes Python scalars and arrays; strict promotion is a rule for the model's arithmetic.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
    useful = finite & jnp.any(jnp.asarray(batch.scored))
    new = TrainState(params, opt_state, state.step)  # type: ignore[arg-type]
    kept = jax.tree.map(lambda a, b: jnp.where(useful, a, b), new, state)
    step = state.step + finite.astype(jnp.int32)
    return kept._replace(step=step), StepReport(loss, accepted, norm, finite)


def _norm(gradients: Params) -> Float[Array, ""]:
    """Euclidean norm over all leaves."""
    return jnp.sqrt(jnp.sum(jnp.stack([jnp.sum(g * g) for g in gradients.values()])))


def compile_step(abstract: DFlashDrafter, options: TrainOptions) -> Callable[..., Any]:
    """`train_step` jitted, state donated; `width` is static, so each width compiles once."""
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

    return jax.jit(step, static_argnames="width", donate_argnums=0)


def compile_measure(abstract: DFlashDrafter) -> Callable[..., Any]:
    """`measure` jitted; `width` is static."""

    def run(params, batch, embed, head, width):
        return measure(with_params(abstract, params), batch, embed, head, width=width)

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
