"""Drafts that the host made, as a drafting method: data of the round, packed for one transfer.

The method keeps nothing on the device: it has no taps and no context. Who proposes is the host's
business (`suffix.py`); the round verifies what it is given.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dflash_jax.decoding.draft import Proposal
from dflash_jax.decoding.sampling import RowDraws


def pack_drafts(drafts: Mapping[int, Sequence[int]], rows: int, draft_len: int) -> np.ndarray:
    """Drafts of each row as int32 [rows, 1 + K]: how many, the tokens, filler.

    Args:
        drafts: at most K tokens a row; a row left out proposes nothing.
    """
    packed = np.zeros((rows, 1 + draft_len), np.int32)
    for row, tokens in drafts.items():
        packed[row, 0] = len(tokens)
        packed[row, 1 : 1 + len(tokens)] = tokens
    return packed


class GivenDrafter:
    """Proposes what `pack_drafts` packed; rows that are not active propose nothing."""

    def __init__(self, packed: Int[Array, "b K1"], active: Bool[Array, " b"]):
        self.packed = packed
        self.active = active
        self.layer_ids: tuple[int, ...] = ()
        self.draft_len = packed.shape[1] - 1

    def propose(
        self,
        arena: Any,
        slots: Int[Array, " b"],
        anchors: Int[Array, " b"],
        draw: RowDraws | None,
    ) -> Proposal:
        counts = jnp.where(self.active, self.packed[:, 0], 0)
        return Proposal(self.packed[:, 1:], counts, None)

    def absorb(self, arena: Any, slots: Any, features: Any, counts: Any) -> Any:
        return arena

    def follows(self, arena: Any, slots: Any) -> Bool[Array, " b"]:
        return self.active
