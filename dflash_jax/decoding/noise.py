"""Random numbers of sampled rows: functions of a row's seed and a token's position, nothing else.

So a row draws the same alone or in a batch, in any slot, and whatever was drafted before. Draws
that must not depend on each other have streams of their own. Everything is float32: bfloat16 noise
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
    """Standard Gumbel noise for each id."""

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(_key(seed, position, stream), (v,), jnp.float32)

    return jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(seeds, positions)


def coins(
    positions: Int[Array, "b t"], seeds: UInt32[Array, " b"], stream: int
) -> Float[Array, "b t"]:
    """Uniform numbers in [0, 1)."""

    def coin(seed: Array, position: Array) -> Array:
        return jax.random.uniform(_key(seed, position, stream), (), jnp.float32)

    return jax.vmap(jax.vmap(coin, in_axes=(None, 0)))(seeds, positions)


def _key(seed: Array, position: Array, stream: int | None) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return key if stream is None else jax.random.fold_in(key, stream)
