"""What a request changes in the target's logits: bias, forbidden ends, penalties.

Each is computed only where a row asks for it. Rows that do not ask keep their logits, whoever is
beside them. What follows is `filters.py` and the draw itself, `sampling.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.options import SlotOptions, TokenCounts


def asks_adjustment(positions: Int[Array, "b t"], options: SlotOptions, v: int) -> Bool[Array, ""]:
    """Whether any row asks for what `adjust_scores` does."""
    return _asks_bias(options, v) | _asks_ban(positions, options, v) | jnp.any(_penalised(options))


def adjust_scores(
    scores: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    drafts: Int[Array, "b K"],
    options: SlotOptions,
    counts: TokenCounts,
) -> Float[Array, "b t v"]:
    """Bias, then forbidden ends, then penalties; arguments as in `choose_tokens`."""
    v = scores.shape[-1]

    def biased(scores: Array) -> Array:
        return scores + _scatter(options.bias_ids, options.bias_values, v)[:, None, :]

    def banned(scores: Array) -> Array:
        ends = _scatter(options.ban_ids, jnp.ones(options.ban_ids.shape, jnp.int32), v) > 0
        early = positions < options.min_positions[:, None]
        return jnp.where(ends[:, None, :] & early[:, :, None], -jnp.inf, scores)

    def penalised(scores: Array) -> Array:
        return penalise(scores, drafts, options, counts)

    scores = jax.lax.cond(_asks_bias(options, v), biased, _unchanged, scores)
    scores = jax.lax.cond(_asks_ban(positions, options, v), banned, _unchanged, scores)
    return jax.lax.cond(jnp.any(_penalised(options)), penalised, _unchanged, scores)


def penalise(
    scores: Float[Array, "b t v"],
    drafts: Int[Array, "b K"],
    options: SlotOptions,
    counts: TokenCounts,
) -> Float[Array, "b t v"]:
    """Repetition of what prompt and answer hold; frequency and presence of what the answer holds.

    Repetition divides a positive logit by r and multiplies any other by r (Keskar et al., "CTRL",
    2019); then count x frequency and, where the count is not 0, presence are subtracted.

    The answer at slot i of the block is the history and the drafts before i. That is what plain
    decoding would count exactly where the choice can be committed: where all of them are accepted.
    """
    output = _with_drafts(counts.output_counts, drafts)
    seen = (output > 0) | counts.prompt_seen[:, None, :]
    repetition = options.repetition[:, None, None]
    repeated = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(seen, repeated, scores)
    scores = scores - options.frequency[:, None, None] * output.astype(jnp.float32)
    return scores - jnp.where(output > 0, options.presence[:, None, None], 0.0)


def _with_drafts(output: Int[Array, "b v"], drafts: Int[Array, "b K"]) -> Int[Array, "b t v"]:
    """Counts at each slot of the block, [b, K + 1, v].

    Worked example: drafts [7, 8] add nothing at slot 0, one 7 at slot 1, a 7 and an 8 at slot 2.
    """
    (b, v), width = output.shape, drafts.shape[1]
    rows = jnp.arange(b, dtype=jnp.int32)[:, None, None]
    slots = jnp.arange(width + 1, dtype=jnp.int32)[None, :, None]
    before = jnp.arange(width, dtype=jnp.int32)[None, None, :] < slots
    ids = jnp.where(before, drafts[:, None, :], v)
    every_slot = jnp.broadcast_to(output[:, None, :], (b, width + 1, v))
    return every_slot.at[rows, slots, ids].add(1, mode="drop")


def _scatter(ids: Int[Array, "b m"], values: Array, v: int) -> Array:
    """Sums of the values by id, [b, v]; ids beyond the vocabulary drop out."""
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros((ids.shape[0], v), values.dtype).at[rows, ids].add(values, mode="drop")


def _unchanged(scores: Array) -> Array:
    return scores


def _asks_bias(options: SlotOptions, v: int) -> Bool[Array, ""]:
    return jnp.any(options.bias_ids < v)


def _asks_ban(positions: Int[Array, "b t"], options: SlotOptions, v: int) -> Bool[Array, ""]:
    early = positions[:, :1] < options.min_positions[:, None]
    return jnp.any(early & (options.ban_ids < v))


def _penalised(options: SlotOptions) -> Bool[Array, " b"]:
    return (options.repetition != 1) | (options.presence != 0) | (options.frequency != 0)
