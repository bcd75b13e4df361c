"""The two published layouts of a drafter, and what turns one into the other.

z-lab: embedding and head are the target's. speculators: the drafter brings both, and the flags
`t2d` beside the offsets of a reduced vocabulary. Either reads back as the same drafter. Names of
keys are `config/`'s, files are written by `save.py`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import (
    DrafterConfig,
    TargetConfig,
    Verifier,
    is_speculators,
    read_config,
    to_speculators,
)
from dflash_jax.errors import CheckpointError
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.models.sizes import target_shapes
from dflash_jax.weights import orbax, safetensors
from dflash_jax.weights.load import load_target
from dflash_jax.weights.match import parameters
from dflash_jax.weights.names import DRAFT_FLAGS
from dflash_jax.weights.save import Outgoing
from dflash_jax.weights.vocabulary import EMBEDDING, HEAD, draft_ids, rebuilt

Layout = Literal["zlab", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("zlab", "speculators")


class Tables(NamedTuple):
    """A target's embedding and head [r, e], and how the speculators layout names it."""

    embedding: np.ndarray | jax.Array
    head: np.ndarray | jax.Array
    verifier: Verifier


def layout_of(raw: Mapping[str, Any]) -> Layout:
    """The layout of a drafter's raw config."""
    return "speculators" if is_speculators(raw) else "zlab"


def tables_of(target: Target, name: str = "") -> Tables:
    """The tables of a target in memory."""
    return Tables(target.embedding, target.head, Verifier(name))


def read_tables(folder: Path, name: str) -> Tables:
    """The tables of a target's folder, as memory maps where its files allow it.

    Args:
        name: how the drafter's config shall name the target, a hub id by preference.

    Raises:
        CheckpointError, ConfigError: as `load_target`.
    """
    verifier = Verifier(name, tuple(read_config(folder).get("architectures") or ()))
    if orbax.is_checkpoint(folder):
        return tables_of(load_target(folder))._replace(verifier=verifier)
    config = TargetConfig.from_folder(folder)
    entries = safetensors.select_shapes(target_shapes(config), folder, kind="target")
    embedding = entries[EMBEDDING].open()
    head = embedding if config.tie_word_embeddings else entries[HEAD].open()
    return Tables(embedding, head, verifier)


def in_layout(drafter: DFlashDrafter, layout: Layout, tables: Tables | None) -> DFlashDrafter:
    """The drafter with the tables that its layout has.

    Args:
        tables: of the target. For "speculators" what the drafter lacks is copied from them; for
            "zlab" its own are dropped where they equal them bit for bit. None: they stay.

    Raises:
        CheckpointError: the layout needs tables that are not given, or they do not fit.
    """
    if layout == "speculators":
        return _with_tables(drafter, tables)
    return drafter if tables is None else _without_copies(drafter, tables)


def config_in_layout(config: DrafterConfig, layout: Layout, dtype: str, verifier: Verifier) -> Any:
    """The raw config of a drafter that `in_layout` made."""
    return config.to_dict(dtype) if layout == "zlab" else to_speculators(config, verifier, dtype)


def buffers_of(drafter: DFlashDrafter, layout: Layout) -> list[Outgoing]:
    """Tensors of the layout that are no parameters: `t2d`, with a reduced vocabulary."""
    config = drafter.config
    if layout == "zlab" or config.draft_vocab_size is None:
        return []
    flags = np.zeros((config.vocab_size,), np.bool_)
    flags[draft_ids(np.asarray(drafter.d2t[...]))] = True
    return [Outgoing(DRAFT_FLAGS, flags.dtype, flags.shape, lambda: flags)]


def _with_tables(drafter: DFlashDrafter, tables: Tables | None) -> DFlashDrafter:
    config = drafter.config
    lacks = [n for n in ("has_embed_tokens", "has_lm_head") if not getattr(config, n)]
    if not lacks:
        return drafter
    if tables is None:
        raise CheckpointError(
            "the speculators layout holds an embedding and a head, which this drafter borrows from "
            "its target: give the target"
        )
    wanted = _wanted(drafter, tables)
    complete = dataclasses.replace(config, has_embed_tokens=True, has_lm_head=True)
    return rebuilt(complete, wanted | parameters(drafter))


def _without_copies(drafter: DFlashDrafter, tables: Tables) -> DFlashDrafter:
    config, values = drafter.config, parameters(drafter)
    own = [path for path in (EMBEDDING, HEAD) if path in values]
    if not own:
        return drafter
    wanted = _wanted(drafter, tables)
    for path in own:
        if not np.array_equal(np.asarray(values[path]), np.asarray(wanted[path])):
            raise CheckpointError(
                f"the drafter's own {'.'.join(map(str, path))} differs from the target's, so it "
                "cannot be borrowed: leave the target away to keep it in the z-lab layout"
            )
    lean = dataclasses.replace(config, has_embed_tokens=False, has_lm_head=False)
    return rebuilt(lean, values)


def _wanted(drafter: DFlashDrafter, tables: Tables) -> dict[Any, jax.Array]:
    """Embedding and head as copies of the target's, in the drafter's dtype."""
    config, dtype = drafter.config, drafter.fc.weight[...].dtype
    rows, width = tables.embedding.shape
    if rows < config.vocab_size or width != config.hidden_size:
        raise CheckpointError(
            f"the target's tables are {rows} x {width} and the drafter needs {config.vocab_size} x "
            f"{config.hidden_size}: give the target that it was made for"
        )
    if config.draft_vocab_size is None:
        ids = np.arange(config.vocab_size)
    else:
        ids = draft_ids(np.asarray(drafter.d2t[...]))
    embedding, head = tables.embedding[: config.vocab_size], tables.head[ids]
    return {EMBEDDING: jnp.asarray(embedding, dtype), HEAD: jnp.asarray(head, dtype)}
