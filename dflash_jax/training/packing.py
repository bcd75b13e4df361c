"""Several documents in one row of context, so that short ones leave less padding.

A packed batch has the same blocks, labels and teachers as the unpacked one; only where context lies
changes. Borders are respected by `blocks.context_masks` through `positions` and `firsts`. What is
scored is decided before, in `blocks.build_batch`.
"""

import numpy as np

from dflash_jax.training.blocks import CONTEXT_MULTIPLE, BlockBatch


def row_order(lengths: np.ndarray, per_row: int) -> np.ndarray:
    """Which documents share a row, [rows, per_row]: long ones with short ones.

    Sorted by length and dealt back and forth: lengths 9 7 5 4 2 1 in rows of 2 give 9+1, 7+2, 5+4.
    """
    order = np.argsort(-lengths, kind="stable").reshape(per_row, -1)
    order[1::2] = order[1::2, ::-1]
    return order.T


def pack_batch(batch: BlockBatch, per_row: int, multiple: int = CONTEXT_MULTIPLE) -> BlockBatch:
    """The same blocks with `per_row` documents a row: [b / per_row, per_row m].

    A document brings the context that its last anchor sees, no more. Rows are rounded up to
    `multiple`; what is left of them belongs to no document.

    Worked example: documents that need 3 and 2 rows, packed in one row of 6:

        row        0  1  2  3  4  5
        position   0  1  2  0  1  0     firsts 0 for blocks of the one, 3 for those of the other
    """
    if per_row == 1:
        return batch
    needed = np.asarray(batch.anchors).max(axis=1)
    order = row_order(needed, per_row)
    size = int(needed[order].sum(axis=1).max())
    size = max(-(-size // multiple), 1) * multiple
    source = np.asarray(batch.features)
    features = np.zeros((len(order), size, source.shape[2]), source.dtype)
    positions = np.zeros((len(order), size), np.int32)
    begins = np.zeros(order.shape, np.int32)
    begins[:, 1:] = np.cumsum(needed[order], axis=1)[:, :-1]
    for row, place in np.ndindex(order.shape):
        document, first = order[row, place], begins[row, place]
        count = needed[document]
        features[row, first : first + count] = source[document, :count]
        positions[row, first : first + count] = np.arange(count)

    def joined(array) -> np.ndarray:
        array = np.asarray(array)[order]
        return array.reshape(len(order), -1, *array.shape[3:])

    quota = np.asarray(batch.anchors).shape[1]
    return BlockBatch(
        features,
        joined(batch.anchors),
        joined(batch.anchor_ids),
        joined(batch.labels),
        joined(batch.scored),
        None if batch.final is None else joined(batch.final),
        positions,
        np.repeat(begins, quota, axis=1),
    )
