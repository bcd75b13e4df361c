"""The reference's budgets: its worked vectors, in both orders, and what holds for all of them."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.planning import budget
from dflash_jax.planning.budget import (
    SKIP_ESTIMATION,
    allocation_order,
    context_budget_bytes,
    derived_context_budget,
    skips_estimation,
    weights_per_device,
)

GIB = 1024**3

# total, fraction, weights (GiB) -> budget (GiB), the arena first
ARENA_FIRST = [
    (100, 0.8, 50, 40),
    (100, 0.9, 50, 40),
    (100, 0.5, 50, 40),
    (100, 0.8, None, 90),
    (8, 0.8, 100, 0),
    (4 + 3, 0.8, None, 0),
    (178, 0.9, 62, 106),
    (79, 0.9, 33, 36),
    (70, 0.8, 50, 10),
    (4 + 6 + 1, 0.1, None, 1),
    (4 + 6 + 1, 0.99, None, 1),
]
# total, fraction, weights (GiB) -> bytes or GiB to two decimals, the pool first
POOL_FIRST = [
    (100, 0.8, 50, 6_914_897_346, "6.44"),
    (100, 0.8, None, 14_431_090_114, "13.44"),
    (8, 0.8, 100, 0, "0.00"),
    (178, 0.9, 62, None, "7.84"),
    (79, 0.9, 33, None, "2.94"),
]


def gib(size: float | None) -> int | None:
    return None if size is None else int(size * GIB)


def arena_first(total: float, fraction: float, weights: float | None, **more) -> int:
    return context_budget_bytes(
        total=int(total * GIB),
        weights=gib(weights),
        kv_fraction=fraction,
        allocation_order="arena_first",
        **more,
    )


def pool_first(total: float, fraction: float, weights: float | None, **more) -> int:
    return context_budget_bytes(
        total=int(total * GIB),
        weights=gib(weights),
        kv_fraction=fraction,
        allocation_order="pool_first",
        **more,
    )


def test_the_constants_are_those_of_the_reference():
    assert (budget.OVERHEAD, budget.RESERVE, budget.SAFETY) == (4 * GIB, 6 * GIB, 0.7)
    defaults = inspect.signature(context_budget_bytes).parameters
    assert defaults["overhead"].default == 4 * GIB
    assert defaults["reserve"].default == 6 * GIB
    assert defaults["safety"].default == 0.7


@pytest.mark.parametrize("total, fraction, weights, expected", ARENA_FIRST)
def test_arena_first_budgets_are_those_of_the_reference(total, fraction, weights, expected):
    assert arena_first(total, fraction, weights) == expected * GIB


@pytest.mark.parametrize("total, fraction, weights, exact, shown", POOL_FIRST)
def test_pool_first_budgets_are_those_of_the_reference(total, fraction, weights, exact, shown):
    found = pool_first(total, fraction, weights)
    assert f"{found / GIB:.2f}" == shown
    if exact is not None:
        assert found == pytest.approx(exact, abs=4)


@pytest.mark.parametrize(
    "total, weights, fraction, arena_first_fits, largest",
    [(178, 62, 0.9, True, 99), (79, 33, 0.9, True, 36)],
)
def test_a_10_gib_arena_passes_arena_first_and_is_refused_pool_first(
    total, weights, fraction, arena_first_fits, largest
):
    """128 rows of 83,988,480 bytes and a scratch row: 10.09 GiB."""
    row = 83_988_480
    assert (129 * row <= arena_first(total, fraction, weights)) == arena_first_fits
    left = pool_first(total, fraction, weights)
    assert 129 * row > left
    assert left // row - 1 == largest


def test_half_a_reserve_is_no_negative_budget():
    assert arena_first(4 + 6 / 2, 0.8, None) == 0


def test_both_checkpoints_are_counted_and_divided_by_the_devices():
    """200 + 8 GiB over 4 devices: 52 GiB, and of 100 GiB 38 or 6.16 GiB are left."""
    weights = weights_per_device(200 * GIB, 8 * GIB, devices=4)
    assert weights == 52 * GIB
    assert arena_first(100, 0.8, 52) == 38 * GIB
    assert f"{pool_first(100, 0.8, 52) / GIB:.2f}" == "6.16"


def test_the_targets_weights_are_divided_by_the_devices():
    assert weights_per_device(200 * GIB, None, devices=4) == 50 * GIB


@pytest.mark.parametrize(
    "target, drafter, same, expected",
    [
        (200, 8, False, 208),
        (200, 200, True, 200),
        (None, 8, False, 8),
        (200, None, False, 200),
        (None, 8, True, 8),
        (None, None, False, None),
        (None, None, True, None),
        (0, None, False, 0),
    ],
)
def test_one_checkpoint_counts_once_and_an_unknown_one_is_left_out(target, drafter, same, expected):
    assert weights_per_device(target, drafter, same=same) == expected


def test_unknown_weights_are_not_zero_weights_by_type_but_by_arithmetic():
    assert weights_per_device(None, None) is None
    assert arena_first(100, 0.8, None) == arena_first(100, 0.8, 0)


def test_a_cap_below_the_share_leaves_the_arena_the_rest():
    """46 GiB usable, 10 GiB of pool: 36 x 0.70 = 25.2 GiB."""
    capped = pool_first(100, 0.8, 50, kv_bytes_cap=10 * GIB)
    assert capped == pytest.approx(25.2 * GIB, abs=4)


@pytest.mark.parametrize("cap", [None, 0, 40 * GIB])
def test_no_cap_and_one_above_the_share_change_nothing(cap):
    assert pool_first(100, 0.8, 50, kv_bytes_cap=cap) == pool_first(100, 0.8, 50)


def test_a_cap_has_no_effect_on_an_arena_that_comes_first():
    assert arena_first(100, 0.8, 50, kv_bytes_cap=10 * GIB) == 40 * GIB


def test_a_total_without_overhead_leaves_that_much_more():
    assert arena_first(100, 0.8, 50, overhead=0) == 44 * GIB


def test_the_order_is_a_keyword_without_a_default():
    with pytest.raises(TypeError, match="allocation_order"):
        context_budget_bytes(total=GIB, weights=None, kv_fraction=0.8)  # type: ignore[call-arg]
    kinds = {p.kind for p in inspect.signature(context_budget_bytes).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_arena_first_has_more_than_five_times_as_much():
    assert arena_first(100, 0.9, 50) > 5 * pool_first(100, 0.9, 50)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(0, 2**40),
    weights=st.integers(1, 2**40),
    one=st.floats(0.01, 0.99),
    other=st.floats(0.01, 0.99),
)
def test_arena_first_never_depends_on_the_fraction(total, weights, one, other):
    found = {
        context_budget_bytes(
            total=total, weights=weights, kv_fraction=share, allocation_order="arena_first"
        )
        for share in (one, other)
    }
    assert len(found) == 1 and min(found) >= 0


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(200 * GIB, 400 * GIB),
    weights=st.integers(GIB, 100 * GIB),
    share=st.floats(0.01, 0.99),
)
def test_known_weights_leave_less_in_both_orders(total, weights, share):
    for order in ("arena_first", "pool_first"):
        aware, unaware = (
            context_budget_bytes(
                total=total, weights=known, kv_fraction=share, allocation_order=order
            )
            for known in (weights, None)
        )
        assert 0 <= aware < unaware


def derived(**changes):
    given = {
        "total": 100 * GIB,
        "weights": 50 * GIB,
        "kv_fraction": 0.8,
        "kv_max_tokens": None,
        "kv_max_bytes": None,
        "order": "arena_first",
    }
    return derived_context_budget(**{**given, **changes})


def test_no_budget_is_derived_without_a_total_or_with_a_pool_in_tokens():
    assert derived() == 40 * GIB
    assert derived(kv_max_tokens=1024) is None
    assert derived(total=None) is None


def test_a_pool_in_bytes_is_the_cap_of_a_derived_budget():
    capped = derived(order="pool_first", kv_max_bytes=10 * GIB)
    assert capped == pytest.approx(25.2 * GIB, abs=4)


@pytest.mark.parametrize("asked", ["arena_first", "pool_first"])
@pytest.mark.parametrize("environment", [{}, {SKIP_ESTIMATION: "0"}, {SKIP_ESTIMATION: "true"}])
def test_the_order_that_was_asked_for_holds_and_is_named(asked, environment):
    found = allocation_order(asked, environment)
    assert found.order == asked and asked in found.decided_by
    assert not skips_estimation(environment)


@pytest.mark.parametrize("asked", ["arena_first", "pool_first"])
def test_without_the_abstract_compile_the_pool_comes_first(asked):
    found = allocation_order(asked, {SKIP_ESTIMATION: "1"})
    assert found == ("pool_first", "DFLASH_JAX_SKIP_KV_ESTIMATION=1")
    assert skips_estimation({SKIP_ESTIMATION: "1"})


def test_the_order_reads_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv(SKIP_ESTIMATION, "1")
    assert allocation_order("arena_first").order == "pool_first"
    monkeypatch.delenv(SKIP_ESTIMATION)
    assert allocation_order("arena_first").order == "arena_first"
