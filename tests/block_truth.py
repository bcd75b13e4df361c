"""Oracles of training: what every scored slot of some blocks should see, from plain passes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import tiny_training as tiny
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.training.blocks import BlockBatch, build_batch
from dflash_jax.training.documents import Document
from dflash_jax.training.options import drafter_config
from dflash_jax.training.start import start_drafter

Pair = tuple[list[Document], list[np.ndarray], BlockBatch]
Slots = dict[tuple[int, int, int], np.ndarray]
"""A distribution over the vocabulary by (row, block, slot - 1)."""


def untrained(model: Target, width: int) -> DFlashDrafter:
    """A drafter of noise."""
    config = drafter_config(model.config, tiny.options(block_size=width))
    return start_drafter(config, model, init="random", seed=3)


def two_documents(model: Target, width: int) -> Pair:
    """Two documents, their anchors and their batch; the second's last block hangs over its end."""
    documents = [tiny.document(model, n, 4, seed=n, final=True) for n in (13, 20)]
    anchors = [np.array([5, 7], np.int32), np.array([4, 9, 17], np.int32)]
    return documents, anchors, build_batch(documents, anchors, width=width, quota=3)


def dpace_weights(right: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """D-PACE (2605.18810) with alpha 0.5 from the probability of each label, [..., slots]."""
    reached = np.cumprod(np.where(scored, 0.5 * right + 0.5, 1.0), -1)
    return np.cumsum(reached[..., ::-1], -1)[..., ::-1]


def softmax(logits: Any) -> np.ndarray:
    """Over the last axis, float64."""
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum(-1, keepdims=True)


def teacher_of(
    model: Target, documents: Sequence[Document], anchors: Sequence[np.ndarray], width: int
) -> Slots:
    """p of every scored slot, from the target's forward pass: {(row, block, slot - 1): [v]}."""
    found: Slots = {}
    for row, (document, chosen) in enumerate(zip(documents, anchors, strict=True)):
        logits = np.asarray(model.forward(jnp.asarray(document.ids))[0])
        for block, anchor in enumerate(chosen.tolist()):
            for slot in range(1, width):
                if anchor + slot < len(document.ids):
                    found[row, block, slot - 1] = softmax(logits[anchor + slot - 1])
    return found


def drafted_of(
    model: Target,
    drafter: DFlashDrafter,
    documents: Sequence[Document],
    anchors: Sequence[np.ndarray],
    width: int,
) -> Slots:
    """q of the same slots, each block alone by the forward pass that serving is held to."""
    found: Slots = {}
    for row, (document, chosen) in enumerate(zip(documents, anchors, strict=True)):
        for block, anchor in enumerate(chosen.tolist()):
            ids = np.array([document.ids[anchor]] + [tiny.MASK] * (width - 1), np.int32)
            logits = drafter.forward(
                jnp.asarray(document.features[:anchor], jnp.float32),
                jnp.asarray(ids),
                anchor + jnp.arange(width, dtype=jnp.int32),
                model.embedding,
                model.head,
            )[1]
            for slot in range(1, width):
                if anchor + slot < len(document.ids):
                    found[row, block, slot - 1] = softmax(logits[slot])
    return found
