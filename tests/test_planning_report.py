"""Sizes, tables and the bar: what is printed, and that nothing makes it fail."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.planning.report import bar, gib, table

GIB = 1024**3
WIDTH = 60


@pytest.mark.parametrize(
    "size, shown",
    [
        (0, "0 B"),
        (324, "324 B"),
        (16_383, "16,383 B"),
        (2**20, "1.00 MiB"),
        (80 * 2**20, "80.00 MiB"),
        (GIB, "1.00 GiB"),
        (1_385_472_000, "1.29 GiB"),
        (177_168_752_640, "165.00 GiB"),
        (2000 * GIB, "2,000.00 GiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_says_most(size, shown):
    assert gib(size) == shown


def test_columns_are_aligned_and_the_last_one_stays_left():
    assert table([("a", "1", "x y"), ("long", "1,000", "")]) == ["a         1  x y", "long  1,000"]


def test_a_bar_shows_each_part_to_scale_and_what_is_free():
    shown, legend = bar([("weights", 30), ("arena", 15), ("nothing", 0)], 60)
    assert shown == f"[{'A' * 30}{'B' * 15}{'.' * 15}]"
    assert legend == "A weights, B arena"


def test_a_part_too_small_for_a_cell_gets_one():
    shown, _ = bar([("weights", 30), ("state", 1)], 6000)
    assert shown == f"[AB{'.' * 58}]"


def test_what_passes_the_device_stands_behind_its_end():
    shown, _ = bar([("weights", 60), ("arena", 30)], 60)
    assert shown == f"[{'A' * 60}]{'B' * 30}  beyond the device"


@pytest.mark.parametrize("total", [0, 1, 1000])
def test_a_plan_far_beyond_the_device_is_cut_and_not_printed_whole(total):
    """A full device: 100 GiB against nothing is no bar of a trillion letters."""
    shown, legend = bar([("weights", 100 * GIB), ("arena", 5)], total)
    assert shown.endswith("…  beyond the device")
    assert len(shown) < 3 * WIDTH
    assert legend == "A weights, B arena"


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 2**50), max_size=10),
    total=st.one_of(st.integers(0, 100), st.integers(0, 2**50)),
)
def test_no_sizes_make_the_bar_fail(sizes, total):
    parts = [(f"part {i}", size) for i, size in enumerate(sizes)]
    shown, legend = bar(parts, total)
    inside = shown[1 : 1 + WIDTH]
    assert shown[0] == "[" and shown[1 + WIDTH] == "]" and set(inside) <= set("ABCDEFGHIJ.")
    assert ("beyond" in shown) == (sum(sizes) > total)
    assert legend.count("part") == sum(size > 0 for size in sizes)
