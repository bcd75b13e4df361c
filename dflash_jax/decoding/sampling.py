"""The target's choice of a token at every verified position, and the drafts of sampled rows.

Greedy rows take the best id. Sampled rows add Gumbel noise that depends only on the row's seed and
the token's position in its sequence: a seeded row draws the same tokens alone or in a batch, in any
slot, with a drafter or without. A draft is accepted by equality with that draw, so what is
committed is plain decoding's text whatever was drafted, and its distribution exactly the target's,
as the row's options shape it. Drafts of seeded rows are drawn with the noise of their positions
(`choose_drafts`): the nearer the drafter is to the target, the more often both draw the same id.
Rows without a seed keep more drafts by `rejection.py`, where the drafter says what it drew from:
the distribution is the same, the text is not promised.

`adjust.py` and `filters.py` are the options' own formulas, `noise.py` the random numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.adjust import adjust_scores, asks_adjustment
from dflash_jax.decoding.filters import shaped_scores
from dflash_jax.decoding.noise import draft_gumbel, gumbel
from dflash_jax.decoding.options import TOP_LOGPROBS, SlotOptions, TokenCounts
from dflash_jax.decoding.rejection import DrawnDrafts, judge_block

UNSOUND = -1
"""Stands for the id where logits were NaN: no draft equals it and nothing is committed."""


def greedy_tokens(logits: Float[Array, "b t v"]) -> Int[Array, "b t"]:
    """argmax; ties go to the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def healthy_tokens(logits: Float[Array, "b t v"]) -> Int[Array, "b t"]:
    """`greedy_tokens`, or `UNSOUND` where a logit is NaN: argmax finds it, if there is one."""
    chosen = greedy_tokens(logits)
    score = jnp.take_along_axis(logits, chosen[:, :, None], axis=-1)[:, :, 0]
    return jnp.where(jnp.isnan(score), UNSOUND, chosen)


def choose_tokens(
    logits: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    drafts: Int[Array, "b K"],
    options: SlotOptions,
    counts: TokenCounts,
) -> Int[Array, "b t"]:
    """The target's token after the anchor and after each draft, K + 1 = t of them.

    The order is vLLM's: bias, forbidden ends, penalties; then a greedy row takes the best id and a
    sampled one divides by its temperature, applies min-p, top-k and top-p, and draws. What no row
    asks for is not computed.

    Args:
        positions: index of each chosen token in its sequence.
        drafts: what was proposed; at slot i, penalties count those before i.
        options, counts: one row for each of the logits'.

    Returns:
        Ids, `UNSOUND` where a logit of the token was NaN.
    """
    return judge_drafts(logits, positions, drafts, options, counts, None)[0]


def judge_drafts(
    logits: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    drafts: Int[Array, "b K"],
    options: SlotOptions,
    counts: TokenCounts,
    drawn: DrawnDrafts | None,
) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
    """`choose_tokens`, and for each row how many drafts at most may be kept by equality with them.

    Args:
        drawn: what drafts were drawn from; sampled rows without a seed are judged by it, and what
            comes behind the kept drafts and one token more has no meaning there. None: every row
            is judged by equality alone.
    """
    sampled = options.temperatures > 0
    unlimited = jnp.full((logits.shape[0],), drafts.shape[1], jnp.int32)

    def best(scores: Array) -> tuple[Array, Array]:
        return healthy_tokens(scores), unlimited

    def adjusted(scores: Array) -> tuple[Array, Array]:
        scores = adjust_scores(scores, positions, drafts, options, counts)
        return jax.lax.cond(jnp.any(sampled), chosen, best, scores)

    def chosen(scores: Array) -> tuple[Array, Array]:
        shaped = shaped_scores(scores, options)
        rejecting = jnp.zeros_like(sampled) if drawn is None else sampled & ~options.seeded
        tokens, limit = equal_draws(scores, shaped, sampled & ~rejecting), unlimited
        if (proposed := drawn) is not None:
            judged, kept = jax.lax.cond(
                jnp.any(rejecting),
                lambda: judge_block(shaped, positions, drafts, proposed, options.seeds),
                lambda: (tokens, limit),
            )
            tokens = jnp.where(rejecting[:, None], judged, tokens)
            limit = jnp.where(rejecting, kept, limit)
        # Not isnan(max): XLA's maximum on CPU loses NaN in arrays of more than some thousand.
        return jnp.where(jnp.any(jnp.isnan(scores), axis=-1), UNSOUND, tokens), limit

    def equal_draws(scores: Array, shaped: Array, drawing: Array) -> Array:
        def drawn_tokens() -> Array:
            noise = gumbel(positions, options.seeds, scores.shape[-1])
            return _draw(scores, shaped, noise, drawing)

        return jax.lax.cond(jnp.any(drawing), drawn_tokens, lambda: greedy_tokens(scores))

    asked = jnp.any(sampled) | asks_adjustment(positions, options, logits.shape[-1])
    return jax.lax.cond(asked, adjusted, best, logits.astype(jnp.float32))


class RowDraws(NamedTuple):
    """How the rows of a general round draw: their drafts, and the target's tokens.

    Attributes:
        options: one row for each row of the round.
        lengths: tokens each row's target holds, the anchor not among them, int32 [b].
    """

    options: SlotOptions
    lengths: Int[Array, " b"]

    def positions(self, count: int) -> Int[Array, "b t"]:
        """Where the next `count` tokens after the anchor stand in their sequences.

        The anchor is at position `lengths`, so the first of them is at lengths + 1.
        """
        return self.lengths[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)[None, :]


def choose_drafts(
    logits: Float[Array, "b K c"],
    ids: Int[Array, " c"] | None,
    vocab_size: int,
    draw: RowDraws | None,
) -> tuple[Int[Array, "b K"], Float[Array, "b K c"] | None]:
    """Drafts as ids of the target: the best, or a sampled row's draw. And what they are drawn from.

    A seeded row draws as the target will, from the drafter's logits under the row's temperature
    and filters, with the target's own noise. Two draws with one noise agree with probability at
    least (1 - d) / (1 + d), where d is the total variation of the two distributions, and always
    where they are equal. A row without a seed draws with noise of its own, for `rejection.py`. Bias
    and penalties are left to the target.

    Args:
        ids: the target's id of each entry, for a reduced vocabulary; None: the target's first ones.
        vocab_size: the target's.
        draw: None: every row is greedy.

    Returns:
        Drafts; log-probabilities of what rows without a seed drew from, zeros in other rows where
        no row is one, None without `draw`.
    """
    chosen, log_q = _drafted(logits, ids, vocab_size, draw)
    return chosen if ids is None else ids.at[chosen].get(mode="promise_in_bounds"), log_q


def _drafted(
    logits: Float[Array, "b K c"],
    ids: Int[Array, " c"] | None,
    vocab_size: int,
    draw: RowDraws | None,
) -> tuple[Int[Array, "b K"], Float[Array, "b K c"] | None]:
    """The drafts of `choose_drafts` as indexes into the drafter's vocabulary."""
    if draw is None:
        return greedy_tokens(logits), None
    options = draw.options
    positions, sampled = draw.positions(logits.shape[1]), options.temperatures > 0
    entries = logits.shape[-1]

    def of_target() -> Array:
        noise = gumbel(positions, options.seeds, vocab_size)
        if ids is None:
            return noise[:, :, :entries]
        return noise.at[:, :, ids].get(mode="promise_in_bounds")

    def drawn(scores: Array) -> tuple[Array, Array]:
        shaped, none = shaped_scores(scores, options), jnp.zeros_like(scores)
        own = sampled & ~options.seeded
        noise = jax.lax.cond(jnp.any(sampled & options.seeded), of_target, lambda: none)

        def unseeded() -> tuple[Array, Array]:
            other = draft_gumbel(positions[:, 0], options.seeds, positions.shape[1], entries)
            return jnp.where(own[:, None, None], other, noise), jax.nn.log_softmax(shaped)

        noise, log_q = jax.lax.cond(jnp.any(own), unseeded, lambda: (noise, none))
        return _draw(scores, shaped, noise, sampled), log_q

    def best(scores: Array) -> tuple[Array, Array]:
        return greedy_tokens(scores), jnp.zeros_like(scores)

    return jax.lax.cond(jnp.any(sampled), drawn, best, logits)


def chosen_logprobs(
    logits: Float[Array, "b t v"], chosen: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Int[Array, "b t m"], Float[Array, "b t m"]]:
    """Log-probabilities under the target's own logits, before any option.

    Returns:
        Of the chosen ids; the best ids of each token, `TOP_LOGPROBS` of them, best first; theirs.
        A vocabulary with fewer is filled up with id -1 and -inf. Meaningless where chosen is
        `UNSOUND`.
    """
    logits = logits.astype(jnp.float32)
    norm = jax.nn.logsumexp(logits, axis=-1)
    places = jnp.maximum(chosen, 0)[:, :, None]
    score = jnp.take_along_axis(logits, places, axis=-1)[:, :, 0]
    found = min(TOP_LOGPROBS, logits.shape[-1])
    best, ids = jax.lax.top_k(logits, found)
    filler = ((0, 0), (0, 0), (0, TOP_LOGPROBS - found))
    return (
        score - norm,
        jnp.pad(ids.astype(jnp.int32), filler, constant_values=-1),
        jnp.pad(best - norm[:, :, None], filler, constant_values=-jnp.inf),
    )


def _draw(
    scores: Float[Array, "b t c"],
    shaped: Float[Array, "b t c"],
    noise: Float[Array, "b t c"],
    sampled: Bool[Array, " b"],
) -> Int[Array, "b t"]:
    """Sampled rows draw from softmax(shaped) by the Gumbel trick, others take the best score."""
    return greedy_tokens(jnp.where(sampled[:, None, None], shaped + noise, scores))
