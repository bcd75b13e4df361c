"""What training minimises and what it measures: blocks through the drafter, loss and accepted run.

Pure functions of arrays. Embedding and head are the target's and get no gradient. The optimiser's
step around it is `step.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.models import DFlashDrafter
from dflash_jax.training import losses
from dflash_jax.training.blocks import BlockBatch, hidden_of_blocks
from dflash_jax.training.head import Candidates, candidate_logits, full_logits
from dflash_jax.training.options import TrainOptions


class LossSums(NamedTuple):
    """Sums over a batch's blocks; those of several batches add up to the sums of all.

    Attributes:
        loss: sum of weight x loss over scored slots; `weight` is the sum of those weights.
        runs: sum of accepted runs (among the candidates) over real blocks; `anchors` counts them.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    runs: Float[Array, ""]
    anchors: Float[Array, ""]

    @property
    def mean_loss(self) -> Float[Array, ""]:
        """Weighted mean over scored slots; 0 without any."""
        return self.loss / jnp.where(self.weight > 0, self.weight, 1.0)

    @property
    def mean_run(self) -> Float[Array, ""]:
        """Mean accepted run; 1 without any block."""
        mean = self.runs / jnp.where(self.anchors > 0, self.anchors, 1.0)
        return jnp.where(self.anchors > 0, mean, 1.0)


def block_sums(
    drafter: DFlashDrafter,
    batch: BlockBatch,
    candidates: Candidates | None,
    embed: Float[Array, "r e"],
    head: Float[Array, "r e"],
    *,
    width: int,
    options: TrainOptions,
) -> LossSums:
    """The loss of a batch, not yet divided: what gradient accumulation adds up exactly."""
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
    runs = losses.accepted_run(jax.lax.stop_gradient(logits), labels, scored)
    real = scored[:, :, 0].astype(jnp.float32)
    summed, weight = losses.weighted_sums(each, weights, scored)
    return LossSums(summed, weight, jnp.sum(runs * real), jnp.sum(real))


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
    runs = losses.accepted_run(logits, labels, scored)
    real = scored[:, :, 0].astype(jnp.float32)
    matches = (jnp.argmax(logits, axis=-1) == labels) & scored
    by_slot = matches.astype(jnp.float32).sum((0, 1))
    every = scored.astype(jnp.float32).sum((0, 1))
    return jnp.sum(runs * real), jnp.sum(real), by_slot, every
