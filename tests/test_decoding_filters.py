"""Thresholds of top-k and top-p against sorting, exactly, on the values that floats offer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.filters import lowest_allowed, top_k_floor, top_p_floor
from sampling_oracle import Wish, options_of

TINIEST = float(np.finfo(np.float32).tiny)
VALUES = {
    "spread": np.random.default_rng(0).normal(0, 5, 200),
    "close": 7 + np.random.default_rng(1).normal(0, 1e-6, 200),
    "negative": -np.random.default_rng(2).exponential(3, 200),
    "every size": np.random.default_rng(3).normal(0, 1, 200)
    * 10.0 ** np.random.default_rng(4).integers(-37, 37, 200),
    "ties": np.random.default_rng(5).integers(-3, 3, 200).astype(float),
    "around zero": np.array([0.0, -0.0, TINIEST, -TINIEST, 0.0, 2 * TINIEST]),
    "infinite": np.array([3.4e38, -3.4e38, -np.inf, 1.0, -np.inf, 0.5]),
    "one": np.array([-2.5]),
}
_top_k = jax.jit(top_k_floor)
_top_p = jax.jit(top_p_floor)


@pytest.mark.parametrize("name", VALUES)
def test_the_threshold_of_top_k_keeps_what_is_not_below_the_kth_value_of_a_sort(name: str):
    """Kept is decided on the device, where a float below the normal ones may count as zero."""
    values = VALUES[name].astype(np.float32)
    best_first = -np.sort(-values)
    ks = np.array([1, 2, 3, 5, 50, 199, 200, 10**9, 0], np.int32)
    scores = jnp.broadcast_to(jnp.asarray(values), (len(ks), 1, len(values)))
    floor = _top_k(scores, jnp.max(scores, axis=-1), jnp.asarray(ks))
    kept = np.asarray(scores >= floor[:, :, None])[:, 0]
    for k, found in zip(ks, kept, strict=True):
        place = min(k, len(values)) - 1 if k else len(values) - 1
        assert np.array_equal(found, values >= best_first[place]), k


@pytest.mark.parametrize("name", ["spread", "close", "ties"])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.37, 0.5, 0.81, 0.99])
def test_the_threshold_of_top_p_is_the_least_id_of_the_smallest_set_that_is_enough(
    name: str, top_p: float
):
    scores = VALUES[name].astype(np.float32)
    shares = np.exp(scores - scores.max())
    order = np.argsort(-scores, kind="stable")
    held = np.cumsum(shares[order].astype(np.float64)) / shares.sum(dtype=np.float64)
    expected = scores[order][np.argmax(held >= top_p)]
    row = jnp.asarray(scores)[None, None], jnp.asarray(shares)[None, None]
    assert _top_p(*row, jnp.array([top_p], jnp.float32))[0, 0] == expected


def test_what_an_earlier_filter_took_out_counts_for_nothing():
    """0.5, 0.3, 0.15, 0.05: of the first three, 0.5 / 0.95 is below 0.53; of all, 0.5 is too."""
    p = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    scores = jnp.log(p)[None, None]
    for kept, top_p, least in (
        (4, 0.53, 1),
        (3, 0.53, 1),
        (3, 0.52, 0),
        (2, 0.62, 0),
        (4, 0.96, 3),
    ):
        shares = jnp.asarray(np.where(np.arange(4) < kept, p / p[0], 0).astype(np.float32))
        floor = _top_p(scores, shares[None, None], jnp.array([top_p], jnp.float32))
        assert floor[0, 0] == scores[0, 0, least], (kept, top_p)


def test_top_p_1_keeps_a_tail_that_a_sum_in_float32_loses():
    """Beside a row that does filter; 1 + 2e-9 is 1 in float32."""
    scores = jnp.array([[[0.0, -20.0]]] * 2, jnp.float32)
    options = options_of([Wish(temperature=1.0), Wish(temperature=1.0, top_p=0.9)])
    best, temperatures = jnp.zeros((2, 1)), jnp.ones((2,))
    floor = lowest_allowed(scores, best, temperatures, options)
    assert np.asarray(scores >= floor[:, :, None]).tolist() == [[[True, True]], [[True, False]]]


def test_a_vocabulary_of_the_real_size_is_cut_exactly():
    scores = np.random.default_rng(9).normal(0, 3, (2, 2, 151_936)).astype(np.float32)
    ks = np.array([40, 1000], np.int32)
    best = jnp.asarray(scores.max(-1))
    floor = np.asarray(_top_k(jnp.asarray(scores), best, jnp.asarray(ks)))
    for row, k in enumerate(ks):
        for token in range(2):
            assert np.sum(scores[row, token] >= floor[row, token]) == k
