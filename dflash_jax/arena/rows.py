"""Reading and writing rows of arena arrays [n, k, s, d]: the index arithmetic of both arenas.

Writes are scatters that drop what lies beyond the array; a dead row gets slot n, a rejected token
position s, never -1 (which would address the last row). Nothing here relies on clamping.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class KeyValues(NamedTuple):
    """Keys and values of one layer, [b, k, s, d] each; keys are normed and rotated."""

    keys: Float[Array, "b k s d"]
    values: Float[Array, "b k s d"]


class ArenaRows(NamedTuple):
    """Consecutive slots of an arena for a pass to read in place; nothing is gathered or copied.

    Attributes:
        layers: the whole arrays, one `KeyValues` [n, k, s, d] a layer.
        slot: the first slot, int32 []; None = 0.
        piece: positions read at a time; None = the whole row at once.
    """

    layers: tuple[KeyValues, ...]
    slot: Int[Array, ""] | None
    piece: int | None


def live_slots(active: Bool[Array, " b"], num_slots: int) -> Int[Array, " b"]:
    """Row b works on slot b; a dead row gets the slot beyond the arena, whose writes drop."""
    rows = jnp.arange(active.shape[0], dtype=jnp.int32)
    return jnp.where(active, rows, num_slots)


def slot_lengths(lengths: Int[Array, " n"], slots: Int[Array, " b"]) -> Int[Array, " b"]:
    """Lengths of the given slots; 0 for the slot beyond the arena."""
    return lengths.at[slots].get(mode="fill", fill_value=0)


def write_rows(
    layers: Sequence[KeyValues],
    slots: Int[Array, " b"],
    starts: Int[Array, " b"],
    new: Sequence[KeyValues],
    counts: Int[Array, " b"],
) -> tuple[KeyValues, ...]:
    """Writes the first `counts` tokens of every row at `starts`, and nothing else.

    Worked example: capacity 10, start 4, three new tokens, count 2 -> positions [4, 5, 10]; the
    third is beyond the array and is dropped.
    """
    capacity = layers[0].keys.shape[2]
    offsets = jnp.arange(new[0].keys.shape[2], dtype=jnp.int32)[None, :]
    kept = offsets < counts[:, None]
    positions = jnp.where(kept, starts[:, None] + offsets, capacity)

    def write(array: Array, tokens: Array) -> Array:
        # Indices on axes 0 and 2 put the token axis first: [b, t, k, d].
        rows = jnp.swapaxes(tokens, 1, 2).astype(array.dtype)
        return array.at[slots[:, None], :, positions].set(rows, mode="drop")

    return tuple(
        KeyValues(write(layer.keys, rows.keys), write(layer.values, rows.values))
        for layer, rows in zip(layers, new, strict=True)
    )


def grow(
    lengths: Int[Array, " n"], slots: Int[Array, " b"], counts: Int[Array, " b"]
) -> Int[Array, " n"]:
    """Lengths after an append; the slot beyond the arena is dropped, so idle rows never grow."""
    return lengths.at[slots].add(counts, mode="drop")


def empty_layers(
    num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> tuple[KeyValues, ...]:
    """Zero-filled arrays: an unused row is read with weight 0, and 0 x NaN would be NaN."""
    return tuple(
        KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )
