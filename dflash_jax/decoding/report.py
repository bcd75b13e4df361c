"""What the host reads after a pass: one packed int32 array, and how it is taken apart.

One array is one device-to-host copy. Log-probabilities travel in it by their bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.options import TOP_LOGPROBS

NOT_RUN = -1
"""`num_accepted_drafts` of a row that took no part: idle, or ended before the round began."""


class Logprobs(NamedTuple):
    """Log-probabilities of the chosen ids and of the best ones; NumPy on the host.

    Attributes:
        chosen: [b, t].
        top_ids: best ids first, [b, t, 20].
        top: theirs, [b, t, 20].
    """

    chosen: Float[Array, "b t"]
    top_ids: Int[Array, "b t m"]
    top: Float[Array, "b t m"]


class RoundReport(NamedTuple):
    """What a round did; of a prefill chunk, K = 0 and `chosen` is the token after it.

    Attributes:
        num_drafts: proposals of each row [b], 0 … K.
        num_accepted_drafts: of which the target agreed [b]; the row commits one token more.
            `NOT_RUN` where the row took no part.
        drafts: proposed ids [b, K].
        chosen: the target's ids [b, K + 1]; the first num_accepted_drafts + 1 are committed. -1
            where the logits were NaN.
        logprobs: of `chosen`; None from programs that do not report any.
    """

    num_drafts: np.ndarray
    num_accepted_drafts: np.ndarray
    drafts: np.ndarray
    chosen: np.ndarray
    logprobs: Logprobs | None = None

    @classmethod
    def unpack(cls, packed: np.ndarray, draft_len: int) -> "RoundReport":
        """Splits [b, …] as `pack` joined it for K = `draft_len`."""
        width = draft_len + 1
        ends = np.cumsum([1, 1, draft_len, width])
        num_drafts, accepted, drafts, chosen, rest = np.split(packed, ends, axis=1)
        logprobs = _unpack_logprobs(rest, width) if rest.shape[1] else None
        return cls(num_drafts[:, 0], accepted[:, 0], drafts, chosen, logprobs)


def pack(
    num_drafts: Int[Array, " b"],
    num_accepted_drafts: Int[Array, " b"],
    drafts: Int[Array, "b K"],
    chosen: Int[Array, "b K1"],
    logprobs: Logprobs | None,
) -> Int[Array, "b r"]:
    """The report of one pass as one array, 2K + 3 columns and 41 a token where logprobs are in."""
    parts = [num_drafts[:, None], num_accepted_drafts[:, None], drafts, chosen]
    if logprobs is not None:
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (logprobs.chosen, logprobs.top)]
        rows = chosen.shape[0]
        parts += [bits[0], logprobs.top_ids.reshape(rows, -1), bits[1].reshape(rows, -1)]
    return jnp.concatenate(parts, axis=1)


def _unpack_logprobs(packed: np.ndarray, width: int) -> Logprobs:
    shape = (packed.shape[0], width, TOP_LOGPROBS)
    top = width * TOP_LOGPROBS
    chosen, ids, best = np.split(packed, [width, width + top], axis=1)
    fields: tuple[Any, ...] = (
        np.ascontiguousarray(chosen).view(np.float32),
        ids.reshape(shape),
        np.ascontiguousarray(best).view(np.float32).reshape(shape),
    )
    return Logprobs(*fields)
