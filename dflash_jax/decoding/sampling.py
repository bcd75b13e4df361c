"""The target's choice of a token at every verified position.

Greedy rows take the best id. Sampled rows add Gumbel noise that depends only on the row's seed and
the token's position in its sequence: a seeded row draws the same tokens alone or in a batch, in any
slot, with a drafter or without. A draft is accepted by equality with that draw, so what is
committed is plain decoding's text whatever was drafted, and its distribution exactly the target's,
as the row's options shape it. Drafts of sampled rows are drawn with the noise of their positions
(`choose_drafts`): the nearer the drafter is to the target, the more often both draw the same id.
Everything is float32: bfloat16 noise has 128 levels and never reaches a thin tail.

`adjust.py` and `filters.py` are the options' own formulas.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding.adjust import adjust_scores, asks_adjustment
from dflash_jax.decoding.filters import lowest_allowed
from dflash_jax.decoding.options import TOP_LOGPROBS, SlotOptions, TokenCounts

UNSOUND = -1
"""Stands for the id where logits were NaN: no draft equals it and nothing is committed."""

# Below this a division would overflow or, where the hardware flushes denormals, be by 0.
LEAST_TEMPERATURE = 1e-37


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
    sampled = options.temperatures > 0

    def adjusted(scores: Array) -> Array:
        scores = adjust_scores(scores, positions, drafts, options, counts)
        return jax.lax.cond(jnp.any(sampled), drawn, healthy_tokens, scores)

    def drawn(scores: Array) -> Array:
        chosen = _draw(scores, positions, options, sampled, None, logits.shape[-1])
        return jnp.where(jnp.isnan(jnp.max(scores, axis=-1)), UNSOUND, chosen)

    asked = jnp.any(sampled) | asks_adjustment(positions, options, logits.shape[-1])
    return jax.lax.cond(asked, adjusted, healthy_tokens, logits.astype(jnp.float32))


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
) -> Int[Array, "b K"]:
    """Drafts as ids of the target: the best, or a sampled row's draw.

    A sampled row draws as the target will, from the drafter's logits under the row's temperature
    and filters, with the target's own noise. Two draws with one noise agree with probability at
    least (1 - d) / (1 + d), where d is the total variation of the two distributions, and always
    where they are equal. Bias and penalties are left to the target.

    Args:
        ids: the target's id of each entry, for a reduced vocabulary; None: the target's first ones.
        vocab_size: the target's.
        draw: None: every row is greedy.
    """
    chosen = _drafted(logits, ids, vocab_size, draw)
    return chosen if ids is None else ids.at[chosen].get(mode="promise_in_bounds")


def _drafted(
    logits: Float[Array, "b K c"],
    ids: Int[Array, " c"] | None,
    vocab_size: int,
    draw: RowDraws | None,
) -> Int[Array, "b K"]:
    """The drafts of `choose_drafts` as indexes into the drafter's vocabulary."""
    if draw is None:
        return greedy_tokens(logits)
    options = draw.options
    positions, sampled = draw.positions(logits.shape[1]), options.temperatures > 0

    def drawn(scores: Array) -> Array:
        return _draw(scores, positions, options, sampled, ids, vocab_size)

    return jax.lax.cond(jnp.any(sampled), drawn, greedy_tokens, logits)


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
    positions: Int[Array, "b t"],
    options: SlotOptions,
    sampled: Bool[Array, " b"],
    ids: Int[Array, " c"] | None,
    vocab_size: int,
) -> Int[Array, "b t"]:
    """Draws from softmax(scores / temperature) over the allowed ids by the Gumbel trick.

    Scores are taken relative to the best before they are divided, so that no temperature overflows
    and the ids that matter keep their precision. `ids` as in `choose_drafts`.
    """
    best = jnp.max(scores, axis=-1)
    temperatures = jnp.maximum(options.temperatures, LEAST_TEMPERATURE)
    floor = lowest_allowed(scores, best, temperatures, options)
    noisy = (scores - best[:, :, None]) / temperatures[:, None, None]
    noise = _gumbel(positions, options.seeds, vocab_size)
    if ids is not None:
        noise = noise.at[:, :, ids].get(mode="promise_in_bounds")
    noisy = noisy + noise[:, :, : scores.shape[-1]]
    noisy = jnp.where(scores < floor[:, :, None], -jnp.inf, noisy)
    return greedy_tokens(jnp.where(sampled[:, None, None], noisy, scores))


def _gumbel(
    positions: Int[Array, "b t"], seeds: UInt32[Array, " b"], v: int
) -> Float[Array, "b t v"]:
    """Standard Gumbel noise for each id: a function of seed and position, of nothing else."""

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (v,), jnp.float32)

    return jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(seeds, positions)
