"""Speculative sampling: a rule for drafts drawn from q that leaves the target's distribution.

The rule is block verification (Sun et al., "Block verification accelerates speculative decoding",
2403.10444, algorithm 2), which judges a draft with those behind it and so keeps no fewer than
min(1, p / q) draft by draft (Leviathan et al., 2211.17192). The first draft is kept with chance
1 - d, d being the total variation of p and q. It is for rows whose user gave no seed. A seed
promises the same text with a drafter or without, which equality with the target's own draw keeps
(`sampling.py`), at a chance between (1 - d) / (1 + d) and 1 - d.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.decoding.noise import RESIDUAL, coins, gumbel


class DrawnDrafts(NamedTuple):
    """What a round's drafts were drawn from.

    Attributes:
        log_q: log-probabilities over the entries of the draft vocabulary, as drawn: after the row's
            temperature and filters. NaN: the drafter failed there, and the draft is not kept.
        ids: the target's id of each entry; None: the target's first ones.
        counts: proposals of each row, 0 … K.
    """

    log_q: Float[Array, "b K c"]
    ids: Int[Array, " c"] | None
    counts: Int[Array, " b"]


def judge_block(
    log_p: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    drafts: Int[Array, "b K"],
    drawn: DrawnDrafts,
    seeds: UInt32[Array, " b"],
) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
    """The tokens after the anchor, and how many drafts of each row are kept.

    With r = p / q of draft i, w(0) = 1 and w(i) = min(1, w(i-1) r): the first i drafts are kept
    where a coin is below h(i) = s / (s + 1 - w(i)), s = sum of max(w(i) p - q, 0) over the ids of
    the token behind them; the largest such i holds. Behind it comes a draw from max(w(i) p - q, 0),
    normalised. There is no q behind the last draft, so that h = w and the draw is from p. Coins are
    functions of the seed and of where the round begins, the draw of its own position.

    Args:
        log_p: of the target, after the row's options; need not be normalised; -inf is allowed.
        positions: index of each of the t = K + 1 tokens in its sequence.

    Returns:
        Tokens, those behind the drawn one without meaning; drafts kept, 0 … counts.
    """
    width = drafts.shape[1]
    slots = jnp.arange(width + 1, dtype=jnp.int32)[None, :]
    p = jnp.exp(log_p - jax.nn.logsumexp(log_p, axis=-1, keepdims=True))
    q = _proposed(drawn)
    weights = _weights(p, q, drafts, drawn.ids)
    # The sum of max(w p - q, 0) is that of w p less that of the smaller ones of w p and q.
    inside = p if drawn.ids is None else p.at[:, :, drawn.ids].get(mode="promise_in_bounds")
    shared = jnp.minimum(weights[:, :, None] * inside[:, :, : q.shape[-1]], q)
    left = jnp.maximum(weights - jnp.sum(shared, axis=-1), 0.0)
    chance = jnp.where(weights < 1, left / (left + 1 - weights), 1.0)
    # A target that failed here, a NaN, ends the run: the token behind it is reported unsound.
    chance = jnp.where(jnp.isnan(chance), weights, chance)
    tossed = coins(positions[:, 0], seeds, width)
    held = (tossed < chance[:, 1:]) & (slots[:, 1:] <= drawn.counts[:, None])
    kept = jnp.max(jnp.where(held, slots[:, 1:], 0), axis=1)
    at = kept[:, None]
    target, proposed = (jnp.take_along_axis(x, at[:, :, None], axis=1)[:, 0] for x in (p, q))
    residual = _residual(jnp.take_along_axis(weights, at, axis=1) * target, proposed, drawn.ids)
    # Where rounding leaves nothing, p and q are equal and p is what is left.
    residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, target)
    place = jnp.take_along_axis(positions, at, axis=1)
    noise = gumbel(place, seeds, target.shape[-1], RESIDUAL)[:, 0]
    behind = jnp.argmax(jnp.log(residual) + noise, axis=-1).astype(jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(slots == at, behind[:, None], padded), kept


def _proposed(drawn: DrawnDrafts) -> Float[Array, "b t c"]:
    """q of each slot; 0 behind the last draft, and where the drafter failed."""
    width = drawn.log_q.shape[1]
    drafted = jnp.arange(width, dtype=jnp.int32)[None, :] < drawn.counts[:, None]
    q = jnp.where(drafted[:, :, None], jnp.exp(drawn.log_q), 0.0)
    return jnp.pad(jnp.where(jnp.isnan(q), 0.0, q), ((0, 0), (0, 1), (0, 0)))


def _weights(
    p: Float[Array, "b t v"],
    q: Float[Array, "b t c"],
    drafts: Int[Array, "b K"],
    ids: Int[Array, " c"] | None,
) -> Float[Array, "b t"]:
    """w(0) … w(K); 0 from a draft on that q does not hold."""
    width = drafts.shape[1]
    ours = jnp.take_along_axis(p[:, :width], drafts[:, :, None], axis=-1)[:, :, 0]
    if ids is None:
        theirs = jnp.take_along_axis(q[:, :width], drafts[:, :, None], axis=-1)[:, :, 0]
    else:
        same = ids[None, None, :] == drafts[:, :, None]
        theirs = jnp.sum(jnp.where(same, q[:, :width], 0.0), axis=-1)
    ratios = jnp.where((theirs > 0) & (ours >= 0), ours / jnp.maximum(theirs, 1e-38), 0.0)
    columns = [jnp.ones_like(ratios[:, 0])]
    for slot in range(width):
        columns.append(jnp.minimum(columns[-1] * ratios[:, slot], 1.0))
    return jnp.stack(columns, axis=1)


def _residual(
    p: Float[Array, "b v"], q: Float[Array, "b c"], ids: Int[Array, " c"] | None
) -> Float[Array, "b v"]:
    """max(p - q, 0), where q has the draft vocabulary's entries."""
    if ids is None:
        less = p.at[:, : q.shape[1]].add(-q)
    else:
        less = p.at[:, ids].add(-q, mode="promise_in_bounds")
    return jnp.maximum(less, 0.0)
