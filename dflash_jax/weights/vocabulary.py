"""A reduced draft vocabulary: which of the target's ids a drafter can propose.

A checkpoint says it by `d2t`, offsets: draft id i stands for the target's id i + d2t[i]. Here they
are checked, a drafter is given one, and the rows of the target's head that belong to those ids are
gathered once. What a draft does with them is `models/drafter.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from dflash_jax.config import DrafterConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models import DFlashDrafter, Target, build_drafter
from dflash_jax.weights import names
from dflash_jax.weights.match import filled, leaves, parameters
from dflash_jax.weights.names import DRAFT_FLAGS, DRAFT_OFFSETS, ParameterPath
from dflash_jax.weights.safetensors import Checkpoint, has_weights

HEAD: ParameterPath = ("lm_head", "weight")
EMBEDDING: ParameterPath = ("embed_tokens", "weight")


def with_draft_vocabulary(drafter: DFlashDrafter, ids: Sequence[int] | np.ndarray) -> DFlashDrafter:
    """The same drafter, which proposes only these ids of the target.

    Args:
        ids: of the target, in any order; usually the most frequent ones of its answers. A head of
            the drafter's own keeps their rows.

    Raises:
        ConfigError: no ids, one that is there twice or outside the vocabulary, or the drafter has
            a reduced vocabulary already.
    """
    config, chosen = drafter.config, np.sort(np.asarray(ids, np.int64))
    if config.draft_vocab_size is not None:
        raise ConfigError(
            f"the drafter has a vocabulary of {config.draft_vocab_size} ids already: start from "
            "the one with the whole vocabulary"
        )
    if problem := _ids_problem(chosen, config.vocab_size):
        raise ConfigError(problem)
    if len(chosen) == config.vocab_size:
        return drafter
    values: dict[ParameterPath, Any] = dict(parameters(drafter))
    if HEAD in values:
        values[HEAD] = values[HEAD][chosen]
    values[DRAFT_OFFSETS] = jnp.asarray(chosen - np.arange(len(chosen)), jnp.int32)
    return rebuilt(dataclasses.replace(config, draft_vocab_size=len(chosen)), values)


def with_whole_vocabulary(drafter: DFlashDrafter) -> DFlashDrafter:
    """The drafter before its vocabulary was reduced, which training can go on from.

    Raises:
        ConfigError: it has a head of its own, whose other rows are gone.
    """
    config = drafter.config
    if config.draft_vocab_size is None:
        return drafter
    if config.has_lm_head:
        raise ConfigError(
            f"the drafter's own head has rows for {config.draft_vocab_size} ids of "
            f"{config.vocab_size}: only one that borrows the target's head gets the others back"
        )
    return rebuilt(dataclasses.replace(config, draft_vocab_size=None), parameters(drafter))


def for_target(drafter: DFlashDrafter, target: Target) -> DFlashDrafter:
    """The drafter as it runs with this target: with its rows of the target's head.

    The rows lie in memory twice then, and a draft reads them alone. Modules of shapes alone
    (`load.unloaded`) work too. Nothing changes without a reduced vocabulary.

    Raises:
        CheckpointError: an id that the target does not have.
        ConfigError: the mesh does not divide the rows evenly.
    """
    config = drafter.config
    if config.draft_vocab_size is None:
        return drafter
    values = leaves(drafter)
    offsets, abstract = values[DRAFT_OFFSETS], isinstance(values[DRAFT_OFFSETS], _Shape)
    if not abstract:
        _refuse(draft_ids(np.asarray(offsets)), target.config.vocab_size, "the drafter")
    if config.has_lm_head:
        return drafter
    head = leaves(target)[EMBEDDING if target.config.tie_word_embeddings else HEAD]
    rows = (config.draft_vocab_size, config.hidden_size)
    sharding = None
    if isinstance(head.sharding, NamedSharding):
        sharding = names.sharding_for(HEAD, rows, head.sharding.mesh)
    if abstract:
        values[HEAD] = jax.ShapeDtypeStruct(rows, head.dtype, sharding=sharding)
    else:
        values[HEAD] = jax.jit(_rows, out_shardings=sharding)(head, drafter.draft_ids)
    return rebuilt(dataclasses.replace(config, has_lm_head=True), values)


def rebuilt(config: DrafterConfig, values: Mapping[ParameterPath, Any]) -> DFlashDrafter:
    """A drafter of these parameters; more of them than the config asks for are left out."""
    # The dtype of a shape is never read: the values bring theirs.
    abstract = nnx.eval_shape(lambda: build_drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return filled(abstract, values)


def draft_ids(offsets: np.ndarray) -> np.ndarray:
    """The target's id of each draft id, int64 [c]."""
    return np.asarray(offsets, np.int64) + np.arange(len(offsets))


def check_offsets(folder: Path, drafter: DFlashDrafter) -> None:
    """Checks what was loaded, and the flags beside it where the folder has them.

    Raises:
        CheckpointError: as `check_folder`.
    """
    config = drafter.config
    if config.draft_vocab_size is None:
        return
    ids = draft_ids(np.asarray(drafter.d2t[...]))
    _refuse(ids, config.vocab_size, f"{folder}: tensor d2t")
    if has_weights(folder):
        _check_flags(Checkpoint.from_folder(folder), ids)


def check_folder(folder: str | Path, vocab_size: int | None = None) -> None:
    """Checks the offsets in a folder's files; starts no backend.

    Args:
        vocab_size: of the target; None: the drafter's own count.

    Raises:
        CheckpointError: an id is there twice or outside the vocabulary, or the flags `t2d` name
            other ids.
    """
    config = DrafterConfig.from_folder(Path(folder))
    if config.draft_vocab_size is None:
        return
    checkpoint = Checkpoint.from_folder(folder)
    entry = next(
        e for n, e in checkpoint.tensors.items() if names.parameter_path(n) == DRAFT_OFFSETS
    )
    ids = draft_ids(entry.open_index())
    most = min(config.vocab_size, vocab_size or config.vocab_size)
    _refuse(ids, most, f"{folder}: tensor d2t in {entry.file.name}")
    _check_flags(checkpoint, ids)


_Shape = jax.ShapeDtypeStruct


def _rows(head: jax.Array, ids: jax.Array) -> jax.Array:
    return head.at[ids].get(mode="promise_in_bounds")


def _ids_problem(ids: np.ndarray, vocab_size: int) -> str | None:
    if len(ids) == 0:
        return "a draft vocabulary of 0 ids: give at least 1"
    if ids.min() < 0 or ids.max() >= vocab_size:
        return (
            f"a draft vocabulary with ids from {ids.min()} to {ids.max()}: the target's run from 0 "
            f"to {vocab_size - 1}"
        )
    found, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        return f"a draft vocabulary that has id {found[counts.argmax()]} {counts.max()} times"
    return None


def _refuse(ids: np.ndarray, vocab_size: int, where: str) -> None:
    if problem := _ids_problem(ids, vocab_size):
        raise CheckpointError(
            f"{where}: d2t holds offsets (id = i + d2t[i]), and these give {problem}"
        )


def _check_flags(checkpoint: Checkpoint, ids: np.ndarray) -> None:
    entry = checkpoint.tensors.get(DRAFT_FLAGS)
    if entry is None:
        return
    flagged = np.flatnonzero(entry.open_index())
    if not np.array_equal(flagged, np.sort(ids)):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor t2d in {entry.file.name} flags {len(flagged)} ids and "
            f"d2t, read as offsets, gives {len(ids)}, of which {np.isin(ids, flagged).sum()} are "
            "flagged: the two must name the same ids"
        )
