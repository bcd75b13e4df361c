"""One training document: token ids, where the answer starts, and what the target made of it.

The record that `features.py` hands out and `blocks.py` cuts blocks from. Nothing here reads a file.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_jax.errors import ConfigError


class Document(NamedTuple):
    """A prompt with the target's answer.

    Attributes:
        ids: int32 [t], prompt then answer.
        answer_start: index of the answer's first token; only answer tokens are learned.
        ended: whether the target ended the answer itself (its last token is an end id), so that
            the text is known to be over; False for an answer that was cut.
        features: bfloat16 [t, ae], tapped features of every token; memory-mapped. The last row is
            never read: no anchor has a position after it.
        final: bfloat16 [t, e], the target's hidden states after its final norm, which its head
            turns into the distribution of the *next* token; None where they were not kept.
    """

    ids: np.ndarray
    answer_start: int
    ended: bool
    features: np.ndarray
    final: np.ndarray | None = None

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [t]: which tokens are the target's own answer."""
        return np.arange(len(self.ids)) >= self.answer_start


def check_features(documents: Sequence[Document], taps: int, width: int) -> None:
    """Refuses documents whose features are not those of the drafter's taps.

    Args:
        taps, width: tapped layers, and the target's hidden size.

    Raises:
        ConfigError: some have none (nobody cached them), or those of other layers.
    """
    wrong = [d.features.shape[1] for d in documents if d.features.shape[1] != taps * width]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} of {len(documents)} documents have features of {wrong[0]} numbers a "
            f"token, {taps} taps of {width} are {taps * width}: cache them (cache_features, with "
            'this drafter\'s layer ids) or train with features="computed"'
        )


def check_final(documents: Sequence[Document]) -> None:
    """Refuses documents that a distilling loss cannot learn from.

    Raises:
        ConfigError: some have no final hidden states.
    """
    missing = sum(document.final is None for document in documents)
    if missing:
        raise ConfigError(
            f"{missing} of {len(documents)} documents have no final hidden states, which a "
            "distilling loss compares with: cache their features again with keep_final"
        )
