"""Reading and writing pages of a pool [p, k, s, d]: the counterpart of `rows.py` for page tables.

Position q of a request lies in row q mod s of page `pages[q // s]`. A table is filled up with p,
the page beyond the pool: what would be written there is dropped and what is read there is zero, so
that no index ever ends on somebody else's page (a masked NaN of his would still be 0 x NaN). Who
has which pages, and which are shared, is the host's business (`serving/pages.py`); nobody writes
before the position at which his own pages begin.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.arena.rows import KeyValues


def table_rows(
    table: Int[Array, "n r"], slots: Int[Array, " b"], layers: Sequence[KeyValues]
) -> Int[Array, "b r"]:
    """The pages of the given slots; the slot beyond the arena has none."""
    return table.at[slots].get(mode="fill", fill_value=layers[0].keys.shape[0])


def places_for(
    pages: Int[Array, "b r"],
    starts: Int[Array, " b"],
    counts: Int[Array, " b"],
    width: int,
    *,
    page_size: int,
    num_pages: int,
) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
    """Page and row of the `width` tokens of a pass; page p, beyond the pool, for those not kept.

    Worked example: pages of 4 rows, a request on pages [7, 2], start 3, three new tokens, count 2
    -> pages [7, 2, p], rows [3, 0, 1].
    """
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = starts[:, None] + offsets
    rows = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    found = pages.at[rows, positions // page_size].get(mode="fill", fill_value=num_pages)
    return jnp.where(offsets < counts[:, None], found, num_pages), positions % page_size


def write_pages(
    layers: Sequence[KeyValues],
    pages: Int[Array, "b r"],
    starts: Int[Array, " b"],
    new: Sequence[KeyValues],
    counts: Int[Array, " b"],
) -> tuple[KeyValues, ...]:
    """Writes the first `counts` tokens of every row at `starts`, and nothing else."""
    num_pages, _, page_size, _ = layers[0].keys.shape
    width = new[0].keys.shape[2]
    at = places_for(pages, starts, counts, width, page_size=page_size, num_pages=num_pages)

    def write(array: Array, tokens: Array) -> Array:
        # Indices on axes 0 and 2 put the token axis first: [b, t, k, d].
        rows = jnp.swapaxes(tokens, 1, 2).astype(array.dtype)
        return array.at[at[0], :, at[1]].set(rows, mode="drop")

    return tuple(
        KeyValues(write(layer.keys, rows.keys), write(layer.values, rows.values))
        for layer, rows in zip(layers, new, strict=True)
    )


def read_pages(
    array: Float[Array, "p k s d"], pages: Int[Array, "b m"]
) -> Float[Array, "b k ms d"]:
    """The rows of m pages one after another; zeros for the page beyond the pool."""
    (b, m), (_, kv_heads, page_size, d) = pages.shape, array.shape
    # Heads before pages as they are gathered: a transposition afterwards is one more copy.
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    found = jax.lax.gather(
        array,
        pages[:, :, None],
        numbers,
        slice_sizes=(1, kv_heads, page_size, d),
        mode="fill",
        fill_value=0,
    )
    return found.reshape(b, kv_heads, m * page_size, d)


def copy_page(
    layers: Sequence[KeyValues], source: Int[Array, ""], target: Int[Array, ""]
) -> tuple[KeyValues, ...]:
    """One page's rows also in another, in place: before a request goes on in a shared page."""

    def copy(array: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(array, source, 1)
        return jax.lax.dynamic_update_slice_in_dim(array, page, target, 0)

    return tuple(KeyValues(copy(layer.keys), copy(layer.values)) for layer in layers)


def clean_pages(layers: Sequence[KeyValues], pages: Int[Array, " r"]) -> tuple[KeyValues, ...]:
    """Zeroes pages, NaN included; p names none."""

    def clean(array: Array) -> Array:
        return array.at[pages].set(0.0, mode="drop")

    return tuple(KeyValues(clean(layer.keys), clean(layer.values)) for layer in layers)
