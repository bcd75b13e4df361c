"""What a slot asks of the choice of its tokens, and the counts that penalties look at.

Data of the compiled programs, one row a slot. `sampling.py` and what it calls read it; the bytes
are in `arena/sizes.py`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.arena.sizes import MAX_BIAS, MAX_ENDS

TOP_LOGPROBS = 20
"""Best ids reported beside a chosen one: the most that the OpenAI API lets a request ask for."""

NO_ID = 2**31 - 1
"""Fills lists of ids up: beyond every vocabulary, so that a scatter in drop mode leaves it out."""


class SlotOptions(NamedTuple):
    """How each slot's tokens are chosen. What an option means is in `sampling.py`.

    Attributes:
        temperatures: 0 is greedy, float32 [n].
        seeds: noise of sampled rows, uint32 [n].
        seeded: whether the text must be what plain decoding draws with the seed, bool [n]; else
            drafts may be judged by `rejection.py`, which keeps more of them.
        top_k: 0 = all ids, int32 [n].
        top_p: 1 = all ids, float32 [n].
        min_p: 0 = all ids, float32 [n].
        presence, frequency: subtracted from logits, 0 = off, float32 [n].
        repetition: divides or multiplies logits, 1 = off, float32 [n].
        bias_ids: ids whose logit is raised, filled up with `NO_ID`, int32 [n, 300].
        bias_values: by how much, float32 [n, 300].
        ban_ids: ids that end the answer, filled up with `NO_ID`, int32 [n, 32].
        min_positions: where the sequence is shorter than this, `ban_ids` are forbidden, int32 [n].
        logprobs: whether log-probabilities are to be reported, bool [n].
    """

    temperatures: Float[Array, " n"]
    seeds: UInt32[Array, " n"]
    seeded: Bool[Array, " n"]
    top_k: Int[Array, " n"]
    top_p: Float[Array, " n"]
    min_p: Float[Array, " n"]
    presence: Float[Array, " n"]
    frequency: Float[Array, " n"]
    repetition: Float[Array, " n"]
    bias_ids: Int[Array, "n m"]
    bias_values: Float[Array, "n m"]
    ban_ids: Int[Array, "n m"]
    min_positions: Int[Array, " n"]
    logprobs: Bool[Array, " n"]


class TokenCounts(NamedTuple):
    """What each slot's sequence holds already.

    Attributes:
        prompt_seen: ids of the prompt, bool [n, v].
        output_counts: how often the answer has each id, int32 [n, v].
    """

    prompt_seen: Bool[Array, "n v"]
    output_counts: Int[Array, "n v"]


def init_options(n: int) -> SlotOptions:
    """Greedy, everything else off. No two fields share an array: state is donated."""

    def real(value: float) -> Array:
        return jnp.full((n,), value, jnp.float32)

    return SlotOptions(
        temperatures=real(0.0),
        seeds=jnp.zeros((n,), jnp.uint32),
        seeded=jnp.ones((n,), jnp.bool_),
        top_k=jnp.zeros((n,), jnp.int32),
        top_p=real(1.0),
        min_p=real(0.0),
        presence=real(0.0),
        frequency=real(0.0),
        repetition=real(1.0),
        bias_ids=jnp.full((n, MAX_BIAS), NO_ID, jnp.int32),
        bias_values=jnp.zeros((n, MAX_BIAS), jnp.float32),
        ban_ids=jnp.full((n, MAX_ENDS), NO_ID, jnp.int32),
        min_positions=jnp.zeros((n,), jnp.int32),
        logprobs=jnp.zeros((n,), jnp.bool_),
    )


def init_counts(n: int, v: int) -> TokenCounts:
    """Nothing seen, nothing counted."""
    return TokenCounts(jnp.zeros((n, v), jnp.bool_), jnp.zeros((n, v), jnp.int32))


def count_outputs(
    counts: TokenCounts,
    slots: Int[Array, " b"],
    tokens: Int[Array, "b t"],
    kept: Int[Array, " b"],
) -> TokenCounts:
    """Adds the first `kept` tokens of each row; a row whose slot is n, beyond the last, adds none.

    Only what is committed comes here: a draft that was rejected is never counted.
    """
    output = counts.output_counts
    taken = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < kept[:, None]
    places = jnp.where(taken, slots[:, None], output.shape[0])
    return counts._replace(output_counts=output.at[places, tokens].add(1, mode="drop"))
