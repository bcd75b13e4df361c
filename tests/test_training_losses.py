"""Tests of `training/losses.py` and `training/head.py` against formulas written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.training import head, losses
from dflash_jax.training.objective import LossSums

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 3, 4, 11)).astype(np.float32)
LABELS = RNG.integers(0, 11, (2, 3, 4)).astype(np.int32)
SCORED = RNG.random((2, 3, 4)) < 0.7


def _cross_entropy(logits, labels):
    wide = logits.astype(np.float64)
    chosen = np.take_along_axis(wide, labels[..., None], -1)[..., 0]
    return np.log(np.exp(wide).sum(-1)) - chosen


def test_cross_entropy_is_minus_log_softmax():
    got = losses.cross_entropy(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    np.testing.assert_allclose(got, _cross_entropy(LOGITS, LABELS), rtol=1e-5)


def test_decay_weights_start_at_one_and_fall_by_e_every_gamma_slots():
    got = losses.decay_weights(9, 4.0)
    assert got[0] == 1.0
    assert float(got[4]) == pytest.approx(np.exp(-1.0))
    assert float(got[8]) == pytest.approx(np.exp(-2.0))


def _mean(each, weights, scored):
    none = jnp.zeros((), jnp.float32)
    return LossSums(*losses.weighted_sums(each, weights, scored), none, none).mean_loss


def test_the_loss_is_the_weighted_mean_over_scored_slots():
    each = _cross_entropy(LOGITS, LABELS).astype(np.float32)
    weights = np.exp(-np.arange(4) / 2.0).astype(np.float32)
    kept = weights * SCORED
    expected = (kept * each).sum() / kept.sum()
    got = _mean(jnp.asarray(each), jnp.asarray(weights)[None, None], jnp.asarray(SCORED))
    assert float(got) == pytest.approx(float(expected), rel=1e-5)


def test_dpace_weighs_a_slot_by_the_expected_run_behind_it():
    each = _cross_entropy(LOGITS, LABELS).astype(np.float32)
    q = np.where(SCORED, 0.5 * np.exp(-each) + 0.5, 1.0)
    expected = np.zeros_like(each)
    for j in range(4):
        for i in range(j, 4):
            expected[..., j] += np.prod(q[..., : i + 1], axis=-1)
    got = losses.dpace_weights(jnp.asarray(each), jnp.asarray(SCORED))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_dpace_weights_are_the_slope_of_the_expected_run_by_each_log_probability():
    """Finite differences of sum_i prod_{l <= i} q_l, in float64."""
    each, step = _cross_entropy(LOGITS, LABELS), 1e-6
    log_q = np.where(SCORED, np.log(0.5 * np.exp(-each) + 0.5), 0.0)

    def run(log_q):
        return np.exp(np.cumsum(log_q, -1)).sum(-1)

    slopes = np.stack(
        [(run(log_q + step * bump) - run(log_q - step * bump)) / (2 * step) for bump in np.eye(4)],
        axis=-1,
    )
    got = losses.dpace_weights(jnp.asarray(each, jnp.float32), jnp.asarray(SCORED))
    np.testing.assert_allclose(got, slopes, rtol=1e-5)


def test_dpace_weights_carry_no_gradient():
    def total(loss):
        return jnp.sum(losses.dpace_weights(loss, jnp.asarray(SCORED)))

    gradient = jax.grad(total)(jnp.ones((2, 3, 4), jnp.float32))
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("scored", [np.zeros((2, 3, 4), bool), SCORED])
def test_gradients_are_finite_with_nothing_scored_and_with_a_probability_of_zero(scored):
    """Faults 123 and 125: 0 / 0, and a log of 0 behind a mask."""
    logits = jnp.asarray(LOGITS).at[0, 0, 0, 0].set(-1e30).at[1, 2].set(-1e30)
    labels = jnp.zeros((2, 3, 4), jnp.int32)

    def loss(logits):
        each = losses.cross_entropy(logits, labels)
        weights = losses.dpace_weights(each, jnp.asarray(scored))
        return _mean(each, weights, jnp.asarray(scored))

    value, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    if not scored.any():
        assert float(value) == 0.0 and not np.asarray(gradient).any()


def test_an_accepted_run_counts_leading_matches_and_the_bonus():
    labels = np.array([[[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]]], np.int32)
    picks = np.array([[[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]]])
    scored = np.ones((1, 4, 3), bool)
    scored[0, 3, 1:] = False
    logits = jax.nn.one_hot(picks, 11, dtype=jnp.float32)
    got = losses.accepted_run(logits, jnp.asarray(labels), jnp.asarray(scored))
    assert got.tolist() == [[4.0, 2.0, 1.0, 2.0]]


def test_candidates_hold_every_label_once_and_point_at_it():
    frequent = np.array([3, 1, 4], np.int32)
    labels = np.array([[[4, 9, 3], [9, 7, 1]]], np.int32)
    got = head.choose_candidates(labels, frequent, 5, 40, np.random.default_rng(0))
    ids = np.asarray(got.ids)
    assert len(ids) == 8 == len(set(ids.tolist()))
    np.testing.assert_array_equal(ids[np.asarray(got.labels)], labels)
    assert np.asarray(got.offsets)[:5].tolist() == [0.0] * 5
    # 40 ids, 5 of them listed: 35 unlisted for 3 sampled.
    np.testing.assert_allclose(np.asarray(got.offsets)[5:], np.log(35 / 3), rtol=1e-6)


def test_more_rare_labels_than_extra_rows_grow_the_set():
    labels = np.arange(12, dtype=np.int32).reshape(1, 1, 12)
    got = head.choose_candidates(labels, np.array([0], np.int32), 4, 40, np.random.default_rng(0))
    assert len(np.asarray(got.ids)) == 1 + 12
    np.testing.assert_array_equal(np.asarray(got.ids)[np.asarray(got.labels)], labels)


def test_a_set_that_would_pass_the_vocabulary_is_the_vocabulary():
    labels = np.arange(1, 7, dtype=np.int32).reshape(1, 1, 6)
    got = head.choose_candidates(labels, np.array([0], np.int32), 5, 8, np.random.default_rng(0))
    assert sorted(np.asarray(got.ids).tolist()) == list(range(8))
    assert not np.asarray(got.offsets).any()


def test_the_candidates_estimate_the_full_softmax_without_bias():
    """The mean of the estimated denominator over many samples is the full one (2 %)."""
    vocab, width = 60, 5
    rows = RNG.normal(size=(vocab, width)).astype(np.float32)
    hidden = 0.3 * RNG.normal(size=(1, 1, 1, width)).astype(np.float32)
    full = np.exp(rows.astype(np.float64) @ hidden[0, 0, 0]).sum()
    frequent = np.arange(10, dtype=np.int32)
    rng = np.random.default_rng(1)
    estimates = []
    for _ in range(400):
        c = head.choose_candidates(np.zeros((1, 1, 1), np.int32), frequent, 20, vocab, rng)
        logits = rows[np.asarray(c.ids)] @ hidden[0, 0, 0] + np.asarray(c.offsets)
        estimates.append(np.exp(logits.astype(np.float64)).sum())
    assert np.mean(estimates) == pytest.approx(full, rel=0.02)
    got = head.candidate_logits(
        jnp.asarray(hidden), jnp.asarray(rows), jnp.asarray(c.ids), jnp.asarray(c.offsets)
    )
    np.testing.assert_allclose(got[0, 0, 0], logits, rtol=1e-5, atol=1e-5)
