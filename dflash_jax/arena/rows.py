"""Reading and writing rows of arena arrays [n, k, s, d]: the index arithmetic of both arenas.

Writes are scatters that drop what lies beyond the array; a dead row gets slot n, a rejected token
position s, never -1 (which would address the last row). Nothing here relies on clamping.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Large enough that the loop's own cost vanishes, small beside a row.
COPY_PIECE = 256


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
        ring: position p lies in row p mod s (`ring_positions`), else in row p.
        pages: of each row that reads, int32 [b, r], where the arrays are a pool [p, k, s, d]; then
            there is no `slot` (`paged.py`).
    """

    layers: tuple[KeyValues, ...]
    slot: Int[Array, ""] | None
    piece: int | None
    ring: bool = False
    pages: Int[Array, "b r"] | None = None


def live_slots(active: Bool[Array, " b"], num_slots: int) -> Int[Array, " b"]:
    """Row b works on slot b; a dead row gets the slot beyond the arena, whose writes drop."""
    rows = jnp.arange(active.shape[0], dtype=jnp.int32)
    return jnp.where(active, rows, num_slots)


def slot_lengths(lengths: Int[Array, " n"], slots: Int[Array, " b"]) -> Int[Array, " b"]:
    """Lengths of the given slots; 0 for the slot beyond the arena."""
    return lengths.at[slots].get(mode="fill", fill_value=0)


def ring_positions(
    rows: Int[Array, " s"], lengths: Int[Array, " b"], capacity: int
) -> Int[Array, "b s"]:
    """The position that each row of a ring holds: the last p < length with p mod capacity = row.

    Worked example: capacity 4, length 6 -> rows 0 … 3 hold 4, 5, 2, 3. Length 3 -> 0, 1, 2, -1:
    a negative position was never written.
    """
    last = lengths[:, None] - 1
    return last - (last - rows[None, :]) % capacity


def rows_for(
    starts: Int[Array, " b"],
    counts: Int[Array, " b"],
    width: int,
    capacity: int,
    *,
    ring: bool = False,
) -> Int[Array, "b t"]:
    """Where the `width` tokens of a pass go: `capacity`, beyond the array, for those not kept.

    Worked example: capacity 10, start 4, three new tokens, count 2 -> [4, 5, 10]. A ring of
    capacity 4, start 3, six new tokens, count 5 -> [4, 0, 1, 2, 3, 4]: of the five only the last
    four are kept, since a scatter that names a row twice may write either.
    """
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    kept = offsets < counts[:, None]
    places = starts[:, None] + offsets
    if ring:
        kept = kept & (offsets >= counts[:, None] - capacity)
        places = places % capacity
    return jnp.where(kept, places, capacity)


def write_rows(
    layers: Sequence[KeyValues],
    slots: Int[Array, " b"],
    starts: Int[Array, " b"],
    new: Sequence[KeyValues],
    counts: Int[Array, " b"],
    *,
    ring: bool = False,
) -> tuple[KeyValues, ...]:
    """Writes the first `counts` tokens of every row at `starts`, and nothing else."""
    width, capacity = new[0].keys.shape[2], layers[0].keys.shape[2]
    positions = rows_for(starts, counts, width, capacity, ring=ring)

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


def copy_rows(
    layers: Sequence[KeyValues],
    source: Int[Array, ""],
    target: Int[Array, ""],
    count: Int[Array, ""],
) -> tuple[KeyValues, ...]:
    """Copies the first `count` positions of one slot over those of another, in place.

    A loop over pieces, so that a short prefix does not cost a whole row. The last piece is moved
    back where it would pass the end; what it copies again is the same. A count beyond the row (a
    ring's) is the whole row.
    """
    capacity = layers[0].keys.shape[2]
    piece = min(COPY_PIECE, capacity)
    pieces = (jnp.minimum(count, capacity) + piece - 1) // piece

    def copy(array: Array) -> Array:
        _, kv_heads, _, d = array.shape
        zero = jnp.int32(0)

        def step(index: Array, array: Array) -> Array:
            first = jnp.minimum(index * piece, capacity - piece)
            rows = jax.lax.dynamic_slice(
                array, (source, zero, first, zero), (1, kv_heads, piece, d)
            )
            return jax.lax.dynamic_update_slice(array, rows, (target, zero, first, zero))

        return jax.lax.fori_loop(0, pieces, step, array)

    return tuple(KeyValues(copy(layer.keys), copy(layer.values)) for layer in layers)


def clean_rows(layers: Sequence[KeyValues], slot: Int[Array, ""]) -> tuple[KeyValues, ...]:
    """Zeroes one slot: masking is not enough after a NaN, since 0 x NaN is NaN."""
    return tuple(
        KeyValues(layer.keys.at[slot].set(0.0), layer.values.at[slot].set(0.0)) for layer in layers
    )


def empty_layers(
    num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> tuple[KeyValues, ...]:
    """Zero-filled arrays: an unused row is read with weight 0, and 0 x NaN would be NaN."""
    return tuple(
        KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )
