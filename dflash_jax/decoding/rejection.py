"""Speculative sampling: drafts drawn from q are kept with probability min(1, p / q).

Leviathan et al., "Fast inference from transformers via speculative decoding" (2211.17192), and Chen
et al. (2302.01318). What is committed has the target's distribution p, and no rule keeps more: the
chance of a draft is 1 - d, d being the total variation of p and q. It is for rows whose user gave
no seed. A seed promises the same text with a drafter or without, which equality with the target's
own draw keeps (`sampling.py`), at a chance between (1 - d) / (1 + d) and 1 - d.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding.noise import COIN, RESIDUAL, coins, gumbel


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


def reject_drafts(
    log_p: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    drafts: Int[Array, "b K"],
    drawn: DrawnDrafts,
    seeds: UInt32[Array, " b"],
) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
    """The tokens after the anchor, and how many drafts of each row are kept.

    Draft x is kept where coin x q(x) < p(x). The first that is not is replaced by a draw from
    max(p - q, 0), normalised; behind the last kept one comes a draw from p. Coins and draws are
    functions of seed and position, apart from the noise that drew the drafts.

    Args:
        log_p: of the target, after the row's options; need not be normalised; -inf is allowed.
        positions: index of each of the t = K + 1 tokens in its sequence.

    Returns:
        Tokens, those behind the first replaced one without meaning; drafts kept, 0 … counts.
    """
    width, norm = drafts.shape[1], jax.nn.logsumexp(log_p, axis=-1)
    p = jnp.take_along_axis(log_p[:, :width], drafts[:, :, None], axis=-1)[:, :, 0]
    p = p - norm[:, :width]
    q = _at_drafts(drawn, drafts)
    tossed = jnp.log(coins(positions[:, :width], seeds, COIN))
    kept = (tossed + q < p) & (jnp.arange(width)[None, :] < drawn.counts[:, None])
    run = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    ended = (run < drawn.counts)[:, None]
    at = jnp.minimum(run, width - 1)[:, None, None]
    left = jnp.take_along_axis(log_p, run[:, None, None], axis=1)[:, 0]
    left = jnp.exp(left - jnp.take_along_axis(norm, run[:, None], axis=1))
    rejected = jnp.exp(jnp.take_along_axis(drawn.log_q, at, axis=1)[:, 0])
    rejected = jnp.where(ended & ~jnp.isnan(rejected), rejected, 0.0)
    residual = jnp.maximum(_less(left, rejected, drawn.ids), 0.0)
    # Where rounding leaves nothing, p and q are equal and p is what is left.
    residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, left)
    place = jnp.take_along_axis(positions, run[:, None], axis=1)
    noise = gumbel(place, seeds, left.shape[-1], RESIDUAL)[:, 0]
    replaced = jnp.argmax(jnp.log(residual) + noise, axis=-1).astype(jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    slots = jnp.arange(width + 1, dtype=jnp.int32)[None, :]
    return jnp.where(slots == run[:, None], replaced[:, None], padded), run


def _at_drafts(drawn: DrawnDrafts, drafts: Int[Array, "b K"]) -> Float[Array, "b K"]:
    """log q of each draft; of an id beyond the draft vocabulary -inf, so that p alone decides."""
    if drawn.ids is None:
        found = jnp.take_along_axis(drawn.log_q, drafts[:, :, None], axis=-1)
        return found[:, :, 0]
    same: Bool[Array, "b K c"] = drawn.ids[None, None, :] == drafts[:, :, None]
    return jnp.max(jnp.where(same, drawn.log_q, -jnp.inf), axis=-1)


def _less(
    p: Float[Array, "b v"], q: Float[Array, "b c"], ids: Int[Array, " c"] | None
) -> Float[Array, "b v"]:
    """p - q, where q has the draft vocabulary's entries."""
    if ids is None:
        return p.at[:, : q.shape[1]].add(-q)
    return p.at[:, ids].add(-q, mode="drop")
