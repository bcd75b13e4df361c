"""What a round commits: the longest accepted run of drafts and the target's next token.

What is committed *are* the target's own choices, so greedy and seeded output never depends on the
drafter; what `rejection.py` chose for other rows has the target's distribution.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def num_accepted_drafts(
    drafts: Int[Array, "b K"], counts: Int[Array, " b"], chosen: Int[Array, "b K1"]
) -> Int[Array, " b"]:
    """Length of the longest prefix of the first `counts` drafts equal to the target's choices.

    Args:
        drafts: proposed tokens; entries from `counts` on are filler and never match.
        counts: proposals of each row, 0 … K.
        chosen: the target's token after the anchor and after each draft, K + 1 of them.

    Worked example: drafts [7, 8, 9], count 2, chosen [7, 8, 9, 4] -> 2; with chosen [7, 5, 9, 4]
    -> 1, and tokens 7 and 5 are committed.
    """
    width = drafts.shape[1]
    proposed = jnp.arange(width, dtype=jnp.int32)[None, :] < counts[:, None]
    matches = (drafts == chosen[:, :width]) & proposed
    return jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
