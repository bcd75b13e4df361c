"""What training minimises and what it measures: blocks through the drafter, loss and accepted run.

Pure functions of arrays. Embedding and head are the target's and get no gradient. The optimiser's
step around it is `step.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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


class SampledSums(NamedTuple):
    """What is expected at temperature 1, from the target's own distribution at every slot.

    Attributes:
        runs: expected accepted run of drafts drawn from the drafter (speculative sampling).
        best_runs: of its best drafts, compared with a draw of the target.
        by_slot: sum_v min(p, q) of each slot alone, [k].
    """

    runs: Float[Array, ""]
    best_runs: Float[Array, ""]
    by_slot: Float[Array, " k"]


class Measured(NamedTuple):
    """Sums over the blocks of a batch.

    Attributes:
        runs: accepted runs of greedy rounds.
        anchors: blocks.
        matches, scored: of each slot, [k].
        sampled: None where the documents have no final hidden states.
    """

    runs: Float[Array, ""]
    anchors: Float[Array, ""]
    matches: Float[Array, " k"]
    scored: Float[Array, " k"]
    sampled: SampledSums | None


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
    """The loss of a batch, not yet divided: what gradient accumulation adds up exactly.

    A slot whose label the drafter cannot propose has no loss, and an accepted run ends before it.
    """
    hidden = hidden_of_blocks(drafter, batch, embed, width, options.anchor_chunk)[:, :, 1:]
    scored = jnp.asarray(batch.scored)
    labels = jnp.asarray(batch.labels if candidates is None else candidates.labels)
    logits = _logits(hidden, candidates, head, drafter.config.vocab_size)
    proposed = labels >= 0
    each = losses.cross_entropy(logits, labels)
    if options.weighs_by_run:
        weights = losses.dpace_weights(jnp.where(proposed, each, jnp.inf), scored)
    else:
        weights = losses.decay_weights(width - 1, options.gamma)[None, None, :]
    if options.distils:
        teacher = _teacher_logits(batch, candidates, head, drafter.config.vocab_size)
        share = options.distill_weight
        each = (1.0 - share) * each + share * _distilling(logits, teacher, options.overlap_weight)
    runs = losses.accepted_run(jax.lax.stop_gradient(logits), labels, scored)
    real = scored[:, :, 0].astype(jnp.float32)
    summed, weight = losses.weighted_sums(each, weights, scored & proposed)
    return LossSums(summed, weight, jnp.sum(runs * real), jnp.sum(real))


def measure(
    drafter: DFlashDrafter,
    batch: BlockBatch,
    embed: Float[Array, "r e"],
    head: Float[Array, "r e"],
    *,
    width: int,
    chunk: int = 0,
    allowed: Int[Array, " c"] | None = None,
) -> Measured:
    """Sums over a batch, every row of the head.

    Args:
        chunk: blocks of a row at a time, as `hidden_of_blocks` has it.
        allowed: the ids that can be proposed; None: all.
    """
    hidden = hidden_of_blocks(drafter, batch, embed, width, chunk)[:, :, 1:]
    logits = full_logits(hidden, head[: drafter.config.vocab_size])
    if allowed is not None:
        never = jnp.full(drafter.config.vocab_size, -jnp.inf).at[allowed].set(0.0)
        logits = logits + never[None, None, None, :]
    labels, scored = jnp.asarray(batch.labels), jnp.asarray(batch.scored)
    runs = losses.accepted_run(logits, labels, scored)
    real = scored[:, :, 0].astype(jnp.float32)
    matches = (jnp.argmax(logits, axis=-1) == labels) & scored
    by_slot = matches.astype(jnp.float32).sum((0, 1))
    every = scored.astype(jnp.float32).sum((0, 1))
    sampled = None
    if batch.final is not None:
        teacher = _teacher_logits(batch, None, head, drafter.config.vocab_size)
        sampled = _sampled_sums(logits, teacher, scored)
    return Measured(jnp.sum(runs * real), jnp.sum(real), by_slot, every, sampled)


def _distilling(
    logits: Float[Array, "b m k c"], teacher: Float[Array, "b m k c"], overlap_weight: float
) -> Float[Array, "b m k"]:
    apart = losses.divergence(logits, teacher)
    if not overlap_weight:
        return apart
    return (1.0 - overlap_weight) * apart + overlap_weight * losses.log_overlap(logits, teacher)


def _logits(
    hidden: Float[Array, "b m k e"],
    candidates: Candidates | None,
    head: Float[Array, "r e"],
    vocab_size: int,
) -> Float[Array, "b m k c"]:
    """Over the candidates, or over the vocabulary."""
    if candidates is None:
        return full_logits(hidden, head[:vocab_size])
    ids, offsets = jnp.asarray(candidates.ids), jnp.asarray(candidates.offsets)
    return candidate_logits(hidden, head, ids, offsets)


def _teacher_logits(
    batch: BlockBatch, candidates: Candidates | None, head: Float[Array, "r e"], vocab_size: int
) -> Float[Array, "b m k c"]:
    """The target's own logits after positions a … a+w-2, over the rows that the drafter's have."""
    assert batch.final is not None, "documents.check_final comes first"
    final = jnp.asarray(batch.final).astype(head.dtype)
    return jax.lax.stop_gradient(_logits(final, candidates, head, vocab_size))


def _sampled_sums(
    logits: Float[Array, "b m k v"], teacher: Float[Array, "b m k v"], scored: Bool[Array, "b m k"]
) -> SampledSums:
    real = scored[:, :, 0].astype(jnp.float32)
    kept = losses.overlap(logits, teacher)
    best = losses.best_in_teacher(logits, teacher)
    return SampledSums(
        jnp.sum(losses.expected_run(kept, scored) * real),
        jnp.sum(losses.expected_run(best, scored) * real),
        jnp.where(scored, kept, 0.0).sum((0, 1)),
    )
