"""Tiny drafters with a reduced vocabulary, written by hand in both layouts.

Nothing here uses the package under test: offsets come from their definition, id = i + d2t[i].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import tiny

EVEN = list(range(0, tiny.VOCAB, 2))


def offsets(ids: Sequence[int]) -> np.ndarray:
    """d2t of the given ids, in their order."""
    return np.array([token - index for index, token in enumerate(ids)], np.int64)


def write_zlab(folder: Path, source: Path, ids: Sequence[int], **changes: Any) -> Path:
    """A z-lab drafter's folder again, with `d2t` and no head: rows of the target's are meant."""
    raw = {**tiny.DRAFTER, **changes}
    raw["dflash_config"] = {**raw["dflash_config"], "draft_vocab_size": len(ids)}
    return tiny.write_checkpoint(
        folder, raw, {**load_file(source / "model.safetensors"), "d2t": offsets(ids)}
    )


def write_speculators(folder: Path, source: Path, ids: Sequence[int], *, seed: int = 5) -> Path:
    """The same in the speculators layout, with a random embedding and head of its own."""
    beside = ("architectures", "block_size", "num_target_layers", "dflash_config")
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {k: v for k, v in tiny.DRAFTER.items() if k not in beside},
        "draft_vocab_size": len(ids),
        "block_size": 4,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": tiny.MASK,
    }
    shapes = {"embed_tokens.weight": (tiny.VOCAB, 32), "lm_head.weight": (len(ids), 32)}
    own = tiny.random_tensors(shapes, seed)
    buffers = {"d2t": offsets(ids), "t2d": np.isin(np.arange(tiny.VOCAB), ids)}
    tensors = load_file(source / "model.safetensors")
    return tiny.write_checkpoint(folder, raw, {**tensors, **own, **buffers})
