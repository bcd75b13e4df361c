"""What training minimises and what it measures: blocks through the drafter, loss and accepted run.

Pure functions of arrays. Embedding and head are the target's and get no gradient. The optimiser's
step around it is `step.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dflash_jax.models import DFlashDrafter
from dflash_jax.training import losses
from dflash_jax.training.blocks import BlockBatch, hidden_of_blocks
from dflash_jax.training.head import Candidates, candidate_logits, full_logits
from dflash_jax.training.options import TrainOptions


def block_loss(
    drafter: DFlashDrafter,
    batch: BlockBatch,
    candidates: Candidates | None,
    embed: Float[Array, "r e"],
    head: Float[Array, "r e"],
    *,
    width: int,
    options: TrainOptions,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The loss of a batch and its mean accepted run (among the candidates); no anchors: 0 and 1."""
    hidden = hidden_of_blocks(drafter, batch, embed, width)[:, :, 1:]
    scored = jnp.asarray(batch.scored)
    if candidates is None:
        labels = jnp.asarray(batch.labels)
        logits = full_logits(hidden, head[: drafter.config.vocab_size])
    else:
        labels = jnp.asarray(candidates.labels)
        logits = candidate_logits(
            hidden, head, jnp.asarray(candidates.ids), jnp.asarray(candidates.offsets)
        )
    each = losses.cross_entropy(logits, labels)
    if options.loss == "dpace":
        weights = losses.dpace_weights(each, scored)
    else:
        weights = losses.decay_weights(width - 1, options.gamma)[None, None, :]
    loss = losses.weighted_mean(each, weights, scored)
    return loss, _mean_run(
        losses.accepted_run(jax.lax.stop_gradient(logits), labels, scored), scored
    )[0]


def measure(
    drafter: DFlashDrafter,
    batch: BlockBatch,
    embed: Float[Array, "r e"],
    head: Float[Array, "r e"],
    *,
    width: int,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, " k"], Float[Array, " k"]]:
    """Sums over a batch: accepted run, anchors, matches a slot, scored a slot; every head row."""
    hidden = hidden_of_blocks(drafter, batch, embed, width)[:, :, 1:]
    logits = full_logits(hidden, head[: drafter.config.vocab_size])
    labels, scored = jnp.asarray(batch.labels), jnp.asarray(batch.scored)
    mean, anchors = _mean_run(losses.accepted_run(logits, labels, scored), scored)
    matches = (jnp.argmax(logits, axis=-1) == labels) & scored
    by_slot = matches.astype(jnp.float32).sum((0, 1))
    return mean * anchors, anchors, by_slot, scored.astype(jnp.float32).sum((0, 1))


def _mean_run(
    runs: Float[Array, "b m"], scored: Bool[Array, "b m k"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean over real blocks (1 if there is none), and their number."""
    real = scored[:, :, 0].astype(jnp.float32)
    count = jnp.sum(real)
    mean = jnp.sum(runs * real) / jnp.where(count > 0, count, 1.0)
    return jnp.where(count > 0, mean, 1.0), count
