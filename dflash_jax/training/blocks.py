"""Blocks cut from documents: anchors, labels, and who sees what.

A block at anchor a has slots o = 0 … w-1 at positions a + o. Slot 0 holds the token at a, the other
slots hold the mask id; slot o is scored against the token at a + o, and slot 0 is not scored. A
slot sees the context rows j < a (the anchor has no feature yet when serving drafts from it) and all
slots of its own block. Source: the masks and labels that the published trainers agree on (DFlash
2602.06036). A row of context may hold several documents one after the other: positions are the
document's own, and no block sees another document. Losses are in `losses.py`, the order of
documents in `batches.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.arena.rows import KeyValues
from dflash_jax.config import DrafterConfig
from dflash_jax.models import DFlashDrafter
from dflash_jax.models.attention import pass_mask
from dflash_jax.training.documents import Document

# Context rows of a step are rounded up to a multiple of this, so that few shapes are compiled.
CONTEXT_MULTIPLE = 64


class BlockBatch(NamedTuple):
    """Blocks of some documents, m for each row (those without an anchor are padding, unscored).

    Attributes:
        features: [b, s, ae], context: rows 0 … s-1 of a document, or of several in a row.
        anchors: int32 [b, m], positions; 0 in padding.
        anchor_ids: int32 [b, m], the tokens at the anchors.
        labels: int32 [b, m, w-1], tokens at a+1 … a+w-1; 0 where unscored.
        scored: bool [b, m, w-1].
        final: bfloat16 [b, m, w-1, e], the target's final hidden states at a … a+w-2: the teacher
            of slot o is the target's distribution after position a+o-1. Zeros where unscored; None
            where the documents have none.
        positions: int32 [b, s], of the context rows in their own document; None: 0 … s-1.
        firsts: int32 [b, m], the context row where the block's document begins; None: 0.
    """

    features: ArrayLike
    anchors: ArrayLike
    anchor_ids: ArrayLike
    labels: ArrayLike
    scored: ArrayLike
    final: ArrayLike | None = None
    positions: ArrayLike | None = None
    firsts: ArrayLike | None = None


def eligible_anchors(loss_mask: np.ndarray, width: int, *, ended: bool) -> np.ndarray:
    """Positions where a block may start.

    An anchor a needs loss_mask[a] and loss_mask[a+1]. Its block must lie inside the document; when
    the document ended itself, blocks may also run past its end, and the slots there are unscored:
    otherwise the end id would only ever be a label of a block's last slot. An answer shorter than a
    block therefore gives anchors only if it ended itself.

    With width 4 and an answer at 2 … 7 (t = 8): cut: 2 3 4; ended: 2 3 4 5 6.
    """
    mask = np.asarray(loss_mask, bool)
    valid = mask[:-1] & mask[1:]
    if not ended:
        valid = valid[: max(len(mask) - width + 1, 0)]
    return np.flatnonzero(valid)


def sample_anchors(eligible: np.ndarray, quota: int, rng: np.random.Generator) -> np.ndarray:
    """min(quota, eligible) distinct anchors of one document, in order.

    The quota is a document's, not a row's, so that short documents are not starved.
    """
    count = min(quota, len(eligible))
    return np.sort(rng.choice(eligible, size=count, replace=False)).astype(np.int32)


def build_batch(
    documents: Sequence[Document],
    anchors: Sequence[np.ndarray],
    *,
    width: int,
    quota: int,
    multiple: int = CONTEXT_MULTIPLE,
) -> BlockBatch:
    """Arrays of one step; context rows are cut after the last anchor, rounded up to `multiple`."""
    count = len(documents)
    last = max((int(a.max()) for a in anchors if len(a)), default=0)
    rows = max(-(-last // multiple), 1) * multiple
    features = np.zeros((count, rows, documents[0].features.shape[1]), jnp.bfloat16)
    starts = np.zeros((count, quota), np.int32)
    anchor_ids = np.zeros((count, quota), np.int32)
    labels = np.zeros((count, quota, width - 1), np.int32)
    scored = np.zeros((count, quota, width - 1), bool)
    final = _no_final(documents, scored.shape)
    for row, (document, chosen) in enumerate(zip(documents, anchors, strict=True)):
        kept = min(rows, len(document.ids) - 1)
        features[row, :kept] = document.features[:kept]
        used = len(chosen)
        starts[row, :used] = chosen
        anchor_ids[row, :used] = document.ids[chosen]
        at = chosen[:, None] + np.arange(1, width)[None, :]
        inside = at < len(document.ids)
        mask = document.loss_mask
        scored[row, :used] = inside & mask[np.minimum(at, len(mask) - 1)]
        labels[row, :used] = np.where(
            scored[row, :used], document.ids[np.minimum(at, len(mask) - 1)], 0
        )
        if final is not None and document.final is not None:
            final[row, scored[row]] = document.final[at[scored[row, :used]] - 1]
    return BlockBatch(features, starts, anchor_ids, labels, scored, final)


def _no_final(documents: Sequence[Document], shape: tuple[int, ...]) -> np.ndarray | None:
    """Room for the teacher's hidden states, if every document has them."""
    if any(document.final is None for document in documents):
        return None
    width = documents[0].final.shape[1]  # type: ignore[union-attr]
    return np.zeros((*shape, width), jnp.bfloat16)


def block_positions(anchors: Int[Array, "b m"], width: int) -> Int[Array, "b mw"]:
    """Positions a … a + w - 1 of every block, blocks side by side."""
    positions = anchors[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None, :]
    return positions.reshape(anchors.shape[0], -1)


def block_ids(anchor_ids: Int[Array, "b m"], mask_id: int, width: int) -> Int[Array, "b mw"]:
    """Anchor, then masks, for every block."""
    masks = jnp.full((*anchor_ids.shape, width - 1), mask_id, jnp.int32)
    ids = jnp.concatenate([anchor_ids[:, :, None], masks], axis=2)
    return ids.reshape(anchor_ids.shape[0], -1)


def context_masks(
    config: DrafterConfig,
    anchors: Int[Array, "b m"],
    rows: int,
    width: int,
    firsts: Int[Array, "b m"] | None = None,
) -> list[Bool[Array, "b mw s"]]:
    """Which context rows each slot sees, a mask a layer: j < a, and q - j < W under a window W.

    With anchors 4 and 6, width 4: slots of the block at 6 see rows 0 … 5, those at 4 rows 0 … 3,
    though the two blocks overlap. A document that begins at row 10: rows 10 … 15 and 10 … 13.
    """
    row = jnp.arange(rows, dtype=jnp.int32)[None, None, :]
    if firsts is not None:
        row = row - jnp.repeat(firsts, width, axis=1)[:, :, None]
    before = (row >= 0) & (row < jnp.repeat(anchors, width, axis=1)[:, :, None])
    distance = block_positions(anchors, width)[:, :, None] - row
    return [before if w is None else before & (distance < w) for w in config.windows]


def block_masks(config: DrafterConfig, count: int, width: int) -> list[Bool[Array, "1 mw mw"]]:
    """Slots see their own block only: both ways, or causally where a layer is causal."""
    own = jnp.repeat(jnp.arange(count, dtype=jnp.int32), width)
    same = (own[:, None] == own[None, :])[None]
    inner = [
        pass_mask(width, causal=causal, window=window)
        for causal, window in zip(config.causal, config.windows, strict=True)
    ]
    return [same & jnp.tile(mask, (1, count, count)) for mask in inner]


def hidden_of_blocks(
    drafter: DFlashDrafter,
    batch: BlockBatch,
    embed: Float[Array, "r e"],
    width: int,
    chunk: int = 0,
) -> Float[Array, "b m w e"]:
    """Hidden states after the final norm of every slot, by the modules that serving runs.

    With `chunk`, blocks of a row are computed that many at a time and once more in the backward
    pass: masks and scores are [b, chunk w, s + chunk w] and nothing is as long as m w squared.
    """
    anchors = jnp.asarray(batch.anchors)
    count, quota = anchors.shape
    features = jnp.asarray(batch.features).astype(drafter.fc.weight[...].dtype)
    rows = features.shape[1]
    if batch.positions is None:
        positions = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None, :], (count, rows))
    else:
        positions = jnp.asarray(batch.positions)
    firsts = jnp.zeros_like(anchors) if batch.firsts is None else jnp.asarray(batch.firsts)
    blocks = (anchors, jnp.asarray(batch.anchor_ids), firsts)
    run = partial(_block_hidden, drafter, drafter.context_kv(features, positions), embed, width)
    if not 0 < chunk < quota:
        return run(blocks)
    parts = -(-quota // chunk)
    hidden = jax.lax.map(jax.checkpoint(run), tuple(_in_parts(a, parts, chunk) for a in blocks))
    hidden = hidden.swapaxes(0, 1).reshape(count, parts * chunk, width, -1)
    return hidden[:, :quota]


def _in_parts(array: Int[Array, "b m"], parts: int, chunk: int) -> Int[Array, "p b c"]:
    """Blocks in parts of equal size; padding blocks have anchor 0 and are cut off afterwards."""
    count, quota = array.shape
    padded = jnp.pad(array, ((0, 0), (0, parts * chunk - quota)))
    return padded.reshape(count, parts, chunk).swapaxes(0, 1)


def _block_hidden(
    drafter: DFlashDrafter,
    context: Sequence[KeyValues],
    embed: Float[Array, "r e"],
    width: int,
    blocks: tuple[Int[Array, "b m"], Int[Array, "b m"], Int[Array, "b m"]],
) -> Float[Array, "b m w e"]:
    """Some blocks of every row (their anchors, anchor ids and first rows) on one context."""
    anchors, anchor_ids, firsts = blocks
    config, (count, quota) = drafter.config, anchors.shape
    ids = block_ids(anchor_ids, config.mask_token_id, width)
    rows = context[0].keys.shape[2]
    hidden = drafter.block_hidden(
        embed.at[ids].get(mode="promise_in_bounds").astype(drafter.fc.weight[...].dtype),
        block_positions(anchors, width),
        context,
        context_masks(config, anchors, rows, width, firsts),
        block_masks(config, quota, width),
    )
    return hidden.reshape(count, quota, width, -1)
