"""The target's choice of a token at every verified position.

Greedy rows take the argmax. Sampled rows add Gumbel noise that depends only on the row's seed and
the token's position in its sequence: a seeded row draws the same tokens alone or in a batch, in any
slot, with a drafter or without, and a draft is accepted by equality with that draw, which leaves
the distribution exactly the target's (the draft does not depend on the noise).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def greedy_tokens(logits: Float[Array, "b t v"]) -> Int[Array, "b t"]:
    """argmax; ties go to the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sampled_tokens(
    logits: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    temperatures: Float[Array, " b"],
    seeds: UInt32[Array, " b"],
) -> Int[Array, "b t"]:
    """Draws from softmax(logits / temperature) by the Gumbel trick; temperature 0 is greedy.

    Everything is float32: bfloat16 noise has 128 levels and never reaches a thin tail.
    """

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    gumbel = jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(seeds, positions)
    sampled = temperatures > 0
    divisor = jnp.where(sampled, temperatures, 1.0)[:, None, None]
    scores = logits.astype(jnp.float32) / divisor
    return greedy_tokens(jnp.where(sampled[:, None, None], scores + gumbel, scores))
