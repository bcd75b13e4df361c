"""Teacher-forced figures on documents that are never trained on.

Cheap, and over many anchors: what the best checkpoint is chosen by. What rounds really commit is
measured by `real_rounds.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.step import Params


class HeldOut(NamedTuple):
    """Figures of one measurement.

    `accepted`: mean over anchors of 1 + leading argmax matches, an estimate of the acceptance
    length of greedy rounds (which start where a round before ended, not anywhere). `by_slot`: share
    of matches of each slot alone.
    """

    accepted: float
    by_slot: tuple[float, ...]
    anchors: int


def held_out_figures(
    run: Callable[..., Any],
    params: Params,
    held: Sequence[BlockBatch],
    embed: jax.Array,
    head: jax.Array,
    width: int,
) -> HeldOut | None:
    """Figures over all held-out batches, None without one; `run` is `compile_measure`'s."""
    if not held:
        return None
    sums = [
        [np.asarray(part) for part in run(params, batch, embed, head, width=width)]
        for batch in held
    ]
    runs, anchors, matches, scored = (sum(column) for column in zip(*sums, strict=True))
    by_slot = np.asarray(matches) / np.maximum(scored, 1)
    return HeldOut(float(runs / max(float(anchors), 1.0)), tuple(map(float, by_slot)), int(anchors))
