"""Hashes that name what a run was begun with, so that a resume with something else is refused."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.models import DFlashDrafter
from dflash_jax.training.documents import Document
from dflash_jax.training.step import drafter_params


def documents_hash(documents: Sequence[Document]) -> str:
    """SHA-256 of ids and answer starts, in order; hex."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(np.array([len(document.ids), document.answer_start], np.int64).tobytes())
        digest.update(np.ascontiguousarray(document.ids, np.int32).tobytes())
    return digest.hexdigest()


def parameters_hash(drafter: DFlashDrafter) -> str:
    """SHA-256 of names and values; hex."""
    digest = hashlib.sha256()
    parameters: dict[str, Any] = drafter_params(drafter)
    for name in sorted(parameters):
        digest.update(name.encode() + np.asarray(parameters[name]).tobytes())
    return digest.hexdigest()
