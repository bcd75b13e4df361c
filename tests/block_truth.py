"""Oracles of training: what every scored slot of some blocks should see, from plain passes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import tiny_training as tiny
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.training.documents import Document

Slots = dict[tuple[int, int, int], np.ndarray]
"""A distribution over the vocabulary by (row, block, slot - 1)."""


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
