"""Random numbers of sampled rows: functions of a row's seed and of places, nothing else.

So a row draws the same alone or in a batch, and in any slot. What decides a round, its drafts and
its coins, hangs on where the round begins: a later round that passes the same positions must draw
anew, for its past already says something of the old numbers. Everything is float32: bfloat16 noise
has 128 levels and never reaches a thin tail.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

# Streams; the target's own draw has none, so that a seed's text is what it always was.
DRAFT, COIN, RESIDUAL = 1, 2, 3


def gumbel(
    positions: Int[Array, "b t"], seeds: UInt32[Array, " b"], v: int, stream: int | None = None
) -> Float[Array, "b t v"]:
    """Standard Gumbel noise for each id of the token at each position."""

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(_key(seed, position, stream), (v,), jnp.float32)

    return jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(seeds, positions)


def draft_gumbel(
    starts: Int[Array, " b"], seeds: UInt32[Array, " b"], count: int, v: int
) -> Float[Array, "b t v"]:
    """Standard Gumbel noise for `count` drafts of a round whose first token is at `starts`."""

    def noise(seed: Array, start: Array) -> Array:
        return jax.random.gumbel(_key(seed, start, DRAFT), (count, v), jnp.float32)

    return jax.vmap(noise)(seeds, starts)


def coins(starts: Int[Array, " b"], seeds: UInt32[Array, " b"], count: int) -> Float[Array, "b t"]:
    """Uniform numbers in [0, 1) for `count` drafts of a round whose first token is at `starts`."""

    def toss(seed: Array, start: Array) -> Array:
        return jax.random.uniform(_key(seed, start, COIN), (count,), jnp.float32)

    return jax.vmap(toss)(seeds, starts)


def _key(seed: Array, position: Array, stream: int | None) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return key if stream is None else jax.random.fold_in(key, stream)
