"""Which documents and anchors a step sees: a pure function of the documents, the seed and the step.

A resumed run therefore continues with exactly the data that it would have had. Every epoch visits
every document once and draws its anchors anew. Nothing here keeps state.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from dflash_jax.errors import ConfigError
from dflash_jax.training.blocks import BlockBatch, build_batch, eligible_anchors, sample_anchors
from dflash_jax.training.documents import Document
from dflash_jax.training.packing import pack_batch

Compute = Callable[[Sequence[Document]], list[Document]]
"""Gives documents their features; `list` where they have them."""

# Documents of similar length share a step: an epoch's order is sorted in groups of this many steps.
_SORTED_STEPS = 16
# Keys that keep the random streams of a seed apart.
_ORDER, _ANCHORS, _HELD_OUT = 0, 1, 2


def split_held_out(
    documents: Sequence[Document], share: float
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, by a hash of each one's ids: stable when more are added.

    Raises:
        ConfigError: no document is left to train on.
    """
    held = [_fraction(document) < share for document in documents]
    train = [d for d, out in zip(documents, held, strict=True) if not out]
    if not train:
        raise ConfigError(f"{len(documents)} documents leave none to train on: give more prompts")
    return train, [d for d, out in zip(documents, held, strict=True) if out]


def documents_at(lengths: np.ndarray, step: int, per_step: int, seed: int) -> np.ndarray:
    """Indices of the documents of a step; the last step of an epoch may have fewer.

    A document's place is redrawn every epoch; those of one step have similar lengths.
    """
    steps = -(-len(lengths) // per_step)
    epoch, index = divmod(step, steps)
    rng = np.random.default_rng((seed, _ORDER, epoch))
    order = rng.permutation(len(lengths))
    size = per_step * _SORTED_STEPS
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    ordered = [group[np.argsort(lengths[group], kind="stable")] for group in groups]
    flat = np.concatenate(ordered)
    places = rng.permutation(steps)
    begin = places[index] * per_step
    return flat[begin : begin + per_step]


def batch_at(
    documents: Sequence[Document],
    lengths: np.ndarray,
    step: int,
    *,
    per_step: int,
    quota: int,
    width: int,
    seed: int,
    pack: int = 1,
    compute: Compute = list,
) -> tuple[np.ndarray, BlockBatch]:
    """Document indices and blocks of a step; short steps are filled with anchorless documents.

    `pack` documents share a row of context; `compute` gives documents the features they lack.
    """
    chosen = documents_at(lengths, step, per_step, seed)
    group = compute([documents[i] for i in chosen])
    anchors = []
    for index, document in zip(chosen, group, strict=True):
        rng = np.random.default_rng((seed, _ANCHORS, step, int(index)))
        eligible = eligible_anchors(document.loss_mask, width, ended=document.ended)
        anchors.append(sample_anchors(eligible, quota, rng))
    missing = per_step - len(group)
    filler, none = [group[0]] * missing, [np.zeros(0, np.int32)] * missing
    batch = build_batch(group + filler, anchors + none, width=width, quota=quota)
    return chosen, pack_batch(batch, pack)


def held_out_batches(
    documents: Sequence[Document],
    *,
    per_step: int,
    quota: int,
    width: int,
    seed: int,
    compute: Compute = list,
) -> list[BlockBatch]:
    """The same anchors every time, so that figures of one run compare with each other."""
    lengths = np.asarray([len(d.ids) for d in documents])
    order = np.argsort(lengths, kind="stable")
    batches = []
    for begin in range(0, len(order), per_step):
        group = compute([documents[i] for i in order[begin : begin + per_step]])
        rng = np.random.default_rng((seed, _HELD_OUT, begin))
        anchors = [
            sample_anchors(eligible_anchors(d.loss_mask, width, ended=d.ended), quota, rng)
            for d in group
        ]
        missing = per_step - len(group)
        filler, none = [group[0]] * missing, [np.zeros(0, np.int32)] * missing
        batches.append(build_batch(group + filler, anchors + none, width=width, quota=quota))
    return batches


def _fraction(document: Document) -> float:
    digest = hashlib.sha256(np.ascontiguousarray(document.ids, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
