"""Which ids a sampled row may draw: min-p, top-k and top-p as one threshold on its scores.

No sort: a threshold is bisected over all float32 values in 32 steps, which is exact. Ids whose
score equals the threshold are all kept, so ties are never broken by id, and the best id always
stays. The draw is in `sampling.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.options import SlotOptions

# Below this a division would overflow or, where the hardware flushes denormals, be by 0.
LEAST_TEMPERATURE = 1e-37


def shaped_scores(scores: Float[Array, "b t v"], options: SlotOptions) -> Float[Array, "b t v"]:
    """Scores over the temperature, -inf where an id may not be drawn; the best one is 0.

    They are taken relative to the best before they are divided, so that no temperature overflows
    and the ids that matter keep their precision. A draw from their softmax is the row's.
    """
    best = jnp.max(scores, axis=-1)
    temperatures = jnp.maximum(options.temperatures, LEAST_TEMPERATURE)
    floor = lowest_allowed(scores, best, temperatures, options)
    shaped = (scores - best[:, :, None]) / temperatures[:, None, None]
    return jnp.where(scores < floor[:, :, None], -jnp.inf, shaped)


def lowest_allowed(
    scores: Float[Array, "b t v"],
    best: Float[Array, "b t"],
    temperatures: Float[Array, " b"],
    options: SlotOptions,
) -> Float[Array, "b t"]:
    """The lowest score that may be drawn: min-p first, then top-k, then top-p of what is left.

    Temperature changes no order, so scores are taken as they are and a threshold of one row is
    the same in any company.

    Args:
        scores: not yet divided by the temperature.
        best: the highest score of each token.
        temperatures: > 0 in every row.

    Worked example: probabilities 0.5, 0.3, 0.15, 0.05 and top_p 0.6 allow the first two, top_p 0.5
    the first alone; top_k 3 with top_p 0.6 allows the first two, for 0.5 / 0.95 < 0.6.
    """
    # p >= min_p x the best p, in logarithms; min_p 0 gives -inf.
    floor = best + temperatures[:, None] * jnp.log(options.min_p)[:, None]
    sampled = options.temperatures > 0

    def among_k(floor: Array) -> Array:
        return jnp.maximum(floor, top_k_floor(scores, best, options.top_k))

    def within_p(floor: Array) -> Array:
        shares = jnp.exp((scores - best[:, :, None]) / temperatures[:, None, None])
        shares = jnp.where(scores < floor[:, :, None], 0.0, shares)
        nucleus = top_p_floor(scores, shares, options.top_p)
        # Row by row: a sum in float32 may lose the thinnest tail, which top_p 1 must keep.
        return jnp.where(options.top_p[:, None] < 1, jnp.maximum(floor, nucleus), floor)

    asks_k = jnp.any(sampled & (options.top_k > 0))
    floor = jax.lax.cond(asks_k, among_k, _unchanged, floor)
    return jax.lax.cond(jnp.any(sampled & (options.top_p < 1)), within_p, _unchanged, floor)


def top_k_floor(
    scores: Float[Array, "b t v"], best: Float[Array, "b t"], top_k: Int[Array, " b"]
) -> Float[Array, "b t"]:
    """The k-th highest score; the lowest one where k is 0 or beyond the vocabulary."""
    v = scores.shape[-1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, v), v)[:, None]

    def enough(values: Array) -> Array:
        above = scores >= values[:, :, None]
        return jnp.sum(above.astype(jnp.int32), axis=-1, dtype=jnp.int32) >= wanted

    return _highest(enough, best)


def top_p_floor(
    scores: Float[Array, "b t v"], shares: Float[Array, "b t v"], top_p: Float[Array, " b"]
) -> Float[Array, "b t"]:
    """The lowest score of the smallest set of best ids that holds `top_p` of all shares.

    Args:
        shares: weights that grow with the scores, the best one 1; they need not add up to 1.
    """
    wanted = top_p[:, None] * jnp.sum(shares, axis=-1)

    def enough(values: Array) -> Array:
        above = jnp.where(shares >= values[:, :, None], shares, 0.0)
        return jnp.sum(above, axis=-1) >= wanted

    least = _highest(enough, jnp.ones_like(wanted))
    return jnp.min(jnp.where(shares >= least[:, :, None], scores, jnp.inf), axis=-1)


def _highest(enough: Callable[[Array], Array], upper: Float[Array, "b t"]) -> Float[Array, "b t"]:
    """The highest float32 up to `upper` for which `enough` holds, as it does at -infinity.

    Args:
        enough: true up to some value and false above it, [b, t] at a time.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # (low + high) / 2 without overflow.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        holds = enough(_float_at(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    lowest = _order(jnp.full_like(upper, -jnp.inf))
    return _float_at(jax.lax.fori_loop(0, 32, halve, (lowest, _order(upper) + 1))[0])


def _order(values: Float[Array, "b t"]) -> Int[Array, "b t"]:
    """int32 that grows as the floats do: the bits, and those of a negative number turned over."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _float_at(order: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """The float of which `_order` is this."""
    bits = jnp.where(order >= 0, order, order ^ jnp.int32(0x7FFFFFFF))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _unchanged(floor: Array) -> Array:
    return floor
