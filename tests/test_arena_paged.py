"""Pages of a pool against the same rows kept in dictionaries, and attention over them.

Poison lies in every page that a row does not list, 1e4 or NaN: none of it may change a bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
import tiny_engine
from dflash_jax.arena import paged
from dflash_jax.arena.kv import (
    append_kv,
    clean_kv_slot,
    copy_kv_page,
    copy_kv_slot,
    init_kv_arena,
    open_kv_slot,
)
from dflash_jax.arena.rows import KeyValues
from dflash_jax.models.attention import CachedRows, Part, attend, pass_mask

PAGES, SIZE, HEADS, DIM = 9, 4, 2, 3
LISTED = 4


def pool(fill: float = 0.0) -> tuple[KeyValues, ...]:
    return (KeyValues(*(jnp.full((PAGES, HEADS, SIZE, DIM), fill) for _ in range(2))),)


def tokens(rows: int, width: int, seed: int) -> tuple[KeyValues, ...]:
    rng = np.random.default_rng(seed)
    shape = (rows, HEADS, width, DIM)
    return (KeyValues(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))),)


def test_the_worked_example_of_places():
    found = paged.places_for(
        jnp.array([[7, 2]], jnp.int32),
        jnp.array([3], jnp.int32),
        jnp.array([2], jnp.int32),
        3,
        page_size=4,
        num_pages=9,
    )
    assert [part.tolist() for part in found] == [[[7, 2, 9]], [[3, 0, 1]]]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_what_is_written_is_what_a_dictionary_of_rows_holds(data: st.DataObject):
    """Fault 58: whatever is dead, beyond the table or rejected is dropped, first and last page
    included."""
    order = data.draw(st.permutations(range(PAGES)))
    held = data.draw(st.lists(st.integers(0, LISTED), min_size=2, max_size=2))
    pages = np.full((2, LISTED), PAGES, np.int32)
    pages[0, : held[0]] = order[: held[0]]
    pages[1, : held[1]] = order[LISTED : LISTED + held[1]]
    starts = data.draw(st.lists(st.integers(0, 18), min_size=2, max_size=2))
    counts = data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2))
    new = tokens(2, 5, data.draw(st.integers(0, 99)))
    wanted = np.full((PAGES, HEADS, SIZE, DIM), 7.0, np.float32)
    for row in range(2):
        for offset in range(min(counts[row], 5)):
            index, place = divmod(starts[row] + offset, SIZE)
            if index < held[row]:
                wanted[pages[row, index], :, place] = new[0].keys[row, :, offset]
    write = jax.jit(paged.write_pages)
    (found,) = write(pool(7.0), jnp.asarray(pages), jnp.array(starts), new, jnp.array(counts))
    np.testing.assert_array_equal(found.keys, wanted)


def test_pages_are_read_one_after_another_and_none_as_zeros():
    array = jnp.arange(PAGES * HEADS * SIZE * DIM, dtype=jnp.float32)
    array = array.reshape(PAGES, HEADS, SIZE, DIM)
    found = paged.read_pages(array, jnp.array([[8, PAGES, 0]], jnp.int32))
    assert found.shape == (1, HEADS, 3 * SIZE, DIM)
    np.testing.assert_array_equal(found[0, :, :SIZE], array[8])
    assert np.all(np.asarray(found[0, :, SIZE : 2 * SIZE]) == 0)
    np.testing.assert_array_equal(found[0, :, 2 * SIZE :], array[0])


def test_the_slot_beyond_the_arena_has_no_pages():
    table = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    found = paged.table_rows(table, jnp.array([2, 3], jnp.int32), pool())
    assert found.tolist() == [[4, 5], [PAGES, PAGES]]


def test_a_page_is_copied_or_zeroed_and_no_other_one():
    rng = np.random.default_rng(0)
    before = rng.standard_normal((PAGES, HEADS, SIZE, DIM)).astype(np.float32)
    before[3] = np.nan
    layers = (KeyValues(jnp.asarray(before), jnp.asarray(before)),)
    (copied,) = paged.copy_page(layers, jnp.int32(8), jnp.int32(0))
    after = before.copy()
    after[0] = before[8]
    np.testing.assert_array_equal(copied.values, after)
    (cleaned,) = paged.clean_pages(layers, jnp.array([3, 0, PAGES], jnp.int32))
    after = before.copy()
    after[[3, 0]] = 0
    np.testing.assert_array_equal(cleaned.keys, after)


LENGTHS, Q_HEADS, WIDTH = (0, 5, 15), 4, 3


def dense(causal: bool, window: int | None, q: Any, own: Any, rows: list[Any]) -> np.ndarray:
    """softmax over absolute positions, written out; `rows` are what each request has in pages."""
    out = np.zeros(q.shape)
    for b, n in enumerate(LENGTHS):
        keys, values = (
            np.concatenate([old[:, :n], new[b]], axis=1).astype(np.float64)
            for old, new in zip(rows[b], own, strict=True)
        )
        for i in range(WIDTH):
            at, places = n + i, np.arange(n + WIDTH)
            seen = places <= at if causal else np.ones(len(places), bool)
            if window is not None:
                seen &= np.abs(at - places) < window
            for h in range(Q_HEADS):
                k = h // (Q_HEADS // HEADS)
                scores = np.where(seen, keys[k] @ q[b, i, h] / np.sqrt(DIM), -np.inf)
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights / weights.sum() @ values[k]
    return out


@pytest.mark.parametrize("piece", [None, 1, 4, 8, 12, 64])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 6), (False, 3)])
def test_attention_over_pages_is_the_dense_softmax_and_knows_no_other_page(
    causal: bool, window: int | None, piece: int | None
):
    """Fault 107. Pages 1 and 6 are free, 8 is a dead row's: NaN in them changes no bit."""
    rng = np.random.default_rng(0)
    b = len(LENGTHS)
    pages = np.array([[PAGES] * 4, [7, 0, PAGES, PAGES], [5, 2, 3, 4]], np.int32)
    q = rng.standard_normal((b, WIDTH, Q_HEADS, DIM)).astype(np.float32)
    own = rng.standard_normal((2, b, HEADS, WIDTH, DIM)).astype(np.float32)
    arrays = rng.standard_normal((2, PAGES, HEADS, SIZE, DIM)).astype(np.float32)
    # Rows behind a request's length: its own stale ones.
    arrays[:, 0, :, 1:] = arrays[:, 4, :, 3:] = 1e4
    lengths = jnp.array(LENGTHS, jnp.int32)
    mask = pass_mask(WIDTH, causal=causal, window=window)
    part = Part(jnp.asarray(own[0]), jnp.asarray(own[1]), mask)

    def run(pool: np.ndarray) -> np.ndarray:
        positions = lengths[:, None] + jnp.arange(WIDTH, dtype=jnp.int32)[None]
        cached = CachedRows(
            jnp.asarray(pool[0]),
            jnp.asarray(pool[1]),
            lengths,
            positions,
            None,
            window,
            piece,
            pages=jnp.asarray(pages),
        )
        return np.asarray(jax.jit(lambda q: attend(q, part, cached))(jnp.asarray(q)))

    found = run(arrays)
    rows = [
        [np.concatenate([one[p] for p in line if p < PAGES] or [one[0]], axis=1) for one in arrays]
        for line in pages
    ]
    np.testing.assert_allclose(found, dense(causal, window, q, own, rows), rtol=0, atol=1e-5)
    for poison in (1e4, np.nan):
        arrays[:, [1, 6, 8]] = poison
        np.testing.assert_array_equal(run(arrays), found)


def arena(slots: int = 3) -> Any:
    config = tiny_engine.resolved(
        tiny.GOLDEN / tiny.PAIRS[0] / "target",
        None,
        kv_layout="paged",
        page_size=SIZE,
        num_pages=PAGES,
        max_seq_len=SIZE * LISTED - 1,
        max_batch_size=slots,
    )
    return init_kv_arena(config, jnp.float32)


def test_an_arena_of_pages_opens_appends_moves_copies_and_cleans_by_its_table():
    made = arena()
    assert made.pages.tolist() == [[PAGES] * LISTED] * 3
    heads, dim = made.layers[0].keys.shape[1::2]
    row = jnp.array([6, 1, PAGES, PAGES], jnp.int32)
    opened: Any = open_kv_slot(made, jnp.int32(1), jnp.int32(3), row)
    assert opened.lengths.tolist() == [0, 3, 0] and opened.pages[1].tolist() == row.tolist()
    ones = KeyValues(*(jnp.ones((1, heads, 4, dim), jnp.float32) for _ in range(2)))
    new = [ones] * len(made.layers)
    grown = append_kv(opened, jnp.array([1], jnp.int32), new, jnp.array([2], jnp.int32))
    assert grown.lengths.tolist() == [0, 5, 0]
    written = np.asarray(grown.layers[-1].keys)[:, 0, :, 0]
    assert np.argwhere(written).tolist() == [[1, 0], [6, 3]]
    moved: Any = copy_kv_slot(grown, jnp.int32(1), jnp.int32(2), grown.lengths[1])
    assert moved.lengths.tolist() == [0, 5, 5] and moved.pages[2].tolist() == row.tolist()
    copied = copy_kv_page(moved, jnp.int32(6), jnp.int32(8))
    np.testing.assert_array_equal(copied.layers[0].keys[8], grown.layers[0].keys[6])
    own = jnp.array([1, PAGES, PAGES, PAGES], jnp.int32)
    cleaned = clean_kv_slot(copied, jnp.int32(2), own)
    written = np.asarray(cleaned.layers[0].values)[:, 0, :, 0]
    assert np.argwhere(written).tolist() == [[6, 3], [8, 3]]
    assert cleaned.lengths.tolist() == [0, 5, 0]
