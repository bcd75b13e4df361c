"""Teacher-forced figures on documents that are never trained on.

Cheap, and over many anchors: what the best checkpoint is chosen by. What rounds really commit is
measured by `real_rounds.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.training.blocks import BlockBatch
from dflash_jax.training.objective import Measured
from dflash_jax.training.step import Params


class HeldOut(NamedTuple):
    """Teacher-forced figures on documents that are never trained on.

    `accepted`: mean over anchors of 1 + leading argmax matches, an estimate of the acceptance
    length of greedy rounds (which start where a round before ended, not anywhere). `by_slot`: share
    of matches of each slot alone.

    With final hidden states, at temperature 1, slots taken as independent: `accepted_sampled`, the
    run expected of drafts kept with probability sum_v min(p, q), which is `sampled_by_slot`
    (draft by draft; `decoding/rejection.py` keeps somewhat more of rows without a seed, equality
    with a seeded draw somewhat fewer); `accepted_best`, the run of argmax drafts.
    """

    accepted: float
    by_slot: tuple[float, ...]
    anchors: int
    accepted_sampled: float | None = None
    accepted_best: float | None = None
    sampled_by_slot: tuple[float, ...] | None = None


def figures_of(measured: Sequence[Measured]) -> HeldOut:
    """Means over all anchors of the batches that were measured."""
    total = jax.tree.map(lambda *parts: sum(np.asarray(part) for part in parts), *measured)
    anchors = max(float(total.anchors), 1.0)
    scored = np.maximum(total.scored, 1.0)
    found = HeldOut(float(total.runs) / anchors, _shares(total.matches, scored), int(total.anchors))
    if total.sampled is None:
        return found
    return found._replace(
        accepted_sampled=float(total.sampled.runs) / anchors,
        accepted_best=float(total.sampled.best_runs) / anchors,
        sampled_by_slot=_shares(total.sampled.by_slot, scored),
    )


def _shares(parts: np.ndarray, whole: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, parts / whole))


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
    return figures_of([run(params, batch, embed, head, width=width) for batch in held])
