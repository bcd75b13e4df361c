"""One training document: token ids, where the answer starts, and the target's features of it.

The record that `features.py` hands out and `blocks.py` cuts blocks from. Nothing here reads a file.
"""

from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """A prompt with the target's answer.

    Attributes:
        ids: int32 [t], prompt then answer.
        answer_start: index of the answer's first token; only answer tokens are learned.
        ended: whether the target ended the answer itself (its last token is an end id), so that
            the text is known to be over; False for an answer that was cut.
        features: bfloat16 [t, ae], tapped features of every token; memory-mapped. The last row is
            never read: no anchor has a position after it.
    """

    ids: np.ndarray
    answer_start: int
    ended: bool
    features: np.ndarray

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [t]: which tokens are the target's own answer."""
        return np.arange(len(self.ids)) >= self.answer_start
