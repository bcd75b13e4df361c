"""Losses of a block's slots: one number per slot, and the weights that combine them.

Slots are counted k = 1 … K from the first prediction. Logits are float32. Nothing here knows how
logits are made (`head.py`) or where labels come from (`blocks.py`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# D-PACE smooths probabilities with this; 0.3 to 0.7 are reported stable (2605.18810).
DPACE_ALPHA = 0.5
# Where `log_overlap` ends: a rate of float32's rounding errors has no useful slope.
_LEAST_OVERLAP = 1e-4


def cross_entropy(
    logits: Float[Array, "b m k c"], labels: Int[Array, "b m k"]
) -> Float[Array, "b m k"]:
    """-log softmax(logits)[label], float32."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def divergence(
    logits: Float[Array, "b m k c"], teacher: Float[Array, "b m k c"]
) -> Float[Array, "b m k"]:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), p = softmax(teacher), q = softmax(logits).

    No gradient reaches the teacher; the gradient by the logits is q - p. Temperature 1, forward
    direction. Source: Hinton et al. 2015 (1503.02531); for drafters DistillSpec (2310.08461).
    Over candidates (`head.py`) both sides hold the same offsets, which cancel in the difference,
    while p gives a sampled id the probability of all those that it stands for: an estimate of the
    sum over the whole vocabulary, with both distributions renormalised over the candidates.
    """
    teacher = jax.lax.stop_gradient(teacher)
    top = jax.nn.logsumexp(teacher, axis=-1)
    p = jnp.exp(teacher - top[..., None])
    # Finite logits keep p (log p - log q) at 0 where p underflows: no log of 0 is taken.
    apart = jnp.sum(p * (teacher - logits), axis=-1)
    return apart - top + jax.nn.logsumexp(logits, axis=-1)


def overlap(
    logits: Float[Array, "b m k v"], teacher: Float[Array, "b m k v"]
) -> Float[Array, "b m k"]:
    """sum_v min(p_v, q_v): how often a draft drawn from q is kept when the text is drawn from p.

    Source: the acceptance rate of speculative sampling, Leviathan et al. 2023 (2211.17192, 3.2).
    """
    return jnp.sum(jnp.minimum(jax.nn.softmax(logits), jax.nn.softmax(teacher)), axis=-1)


def log_overlap(
    logits: Float[Array, "b m k c"], teacher: Float[Array, "b m k c"]
) -> Float[Array, "b m k"]:
    """-log of `overlap`, at most -log 1e-4; no gradient reaches the teacher.

    Its slope is that of the acceptance rate, divided by it: steeper where little is accepted yet,
    and 0 beyond the limit. Over candidates as `divergence`.
    """
    kept = overlap(logits, jax.lax.stop_gradient(teacher))
    return -jnp.log(jnp.maximum(kept, _LEAST_OVERLAP))


def best_in_teacher(
    logits: Float[Array, "b m k v"], teacher: Float[Array, "b m k v"]
) -> Float[Array, "b m k"]:
    """p_v at v = argmax q: how often the best draft is kept when the text is drawn from p."""
    return jnp.exp(-cross_entropy(teacher, jnp.argmax(logits, axis=-1).astype(jnp.int32)))


def expected_run(kept: Float[Array, "b m k"], scored: Bool[Array, "b m k"]) -> Float[Array, "b m"]:
    """1 + sum_i prod_{j <= i} kept_j, slots taken as independent; ends at an unscored slot."""
    return 1.0 + jnp.sum(jnp.cumprod(jnp.where(scored, kept, 0.0), axis=-1), axis=-1)


def decay_weights(count: int, gamma: float) -> Float[Array, " k"]:
    """w_k = exp(-(k-1)/gamma), k = 1 … count.

    Source: DFlash, 2602.06036 appendix A.1 (gamma 4 for a trained block of 8).
    """
    return jnp.exp(-jnp.arange(count, dtype=jnp.float32) / gamma)


def dpace_weights(
    loss: Float[Array, "b m k"], scored: Bool[Array, "b m k"], alpha: float = DPACE_ALPHA
) -> Float[Array, "b m k"]:
    """w_j = sum_{i >= j} prod_{l <= i} q_l with q = (1 - alpha) exp(-CE) + alpha, no gradient.

    The derivative of the expected accepted length with respect to log q_j: a slot counts as much
    as the run behind it is worth. Unscored slots have q = 1. Source: D-PACE, 2605.18810.
    """
    q = jnp.where(scored, (1.0 - alpha) * jnp.exp(-loss) + alpha, 1.0)
    reached = jnp.cumprod(q, axis=-1)
    tail = jnp.flip(jnp.cumsum(jnp.flip(reached, axis=-1), axis=-1), axis=-1)
    return jax.lax.stop_gradient(tail)


def weighted_sums(
    loss: Float[Array, "b m k"], weights: Float[Array, "#b #m k"], scored: Bool[Array, "b m k"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """sum(w CE) and sum(w) over scored slots: batches add up, and the mean is taken at the end."""
    kept = jnp.where(scored, jnp.broadcast_to(weights, scored.shape), 0.0)
    # The loss of an unscored slot is finite but means nothing; where() keeps it out of both passes.
    return jnp.sum(kept * jnp.where(scored, loss, 0.0)), jnp.sum(kept)


def accepted_run(
    logits: Float[Array, "b m k c"], labels: Int[Array, "b m k"], scored: Bool[Array, "b m k"]
) -> Float[Array, "b m"]:
    """1 + leading slots whose argmax is the label: what a greedy round would commit there.

    Labels are the target's own greedy answer, so a match is an accepted draft. A run ends at the
    first unscored slot (the end of the text). Padding blocks give 1.
    """
    matches = (jnp.argmax(logits, axis=-1) == labels) & scored
    return 1.0 + jnp.sum(jnp.cumprod(matches.astype(jnp.float32), axis=-1), axis=-1)
