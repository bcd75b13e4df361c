"""Tests of distillation: the teacher of every slot, the divergence, and what sampling is expected
to keep. The oracles are NumPy formulas and the target's own forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from block_truth import (
    dpace_weights,
    drafted_of,
    softmax,
    teacher_of,
    two_documents,
    untrained,
)
from dflash_jax.errors import ConfigError
from dflash_jax.training import head, losses, objective
from dflash_jax.training.blocks import build_batch
from dflash_jax.training.trainer import train

WIDTH = 4
RNG = np.random.default_rng(0)
Q = RNG.normal(size=(2, 3, 4, 11)).astype(np.float32)
P = RNG.normal(size=(2, 3, 4, 11)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def drafter(model):
    return untrained(model, WIDTH)


@pytest.fixture(scope="module")
def pair(model):
    return two_documents(model, WIDTH)


@pytest.fixture(scope="module")
def truth(model, drafter, pair):
    """p and q of every scored slot."""
    documents, anchors, _ = pair
    return teacher_of(model, documents, anchors, WIDTH), drafted_of(
        model, drafter, documents, anchors, WIDTH
    )


def test_the_divergence_is_the_sum_of_p_log_p_over_q_and_its_gradient_q_minus_p():
    p, q = softmax(P), softmax(Q)
    got = losses.divergence(jnp.asarray(Q), jnp.asarray(P))
    np.testing.assert_allclose(got, (p * np.log(p / q)).sum(-1), rtol=1e-4, atol=1e-6)
    by_q, by_p = jax.grad(lambda a, b: jnp.sum(losses.divergence(a, b)), argnums=(0, 1))(
        jnp.asarray(Q), jnp.asarray(P)
    )
    np.testing.assert_allclose(by_q, q - p, atol=1e-6)
    assert not np.asarray(by_p).any()


def test_the_divergence_is_zero_from_oneself_and_finite_with_a_probability_of_zero():
    """Fault 125: a p that underflows meets a log of 0."""
    sharp = jnp.asarray(P).at[..., 0].set(2000.0)
    assert float(jnp.abs(losses.divergence(jnp.asarray(P), jnp.asarray(P))).max()) < 1e-6
    value, gradient = jax.value_and_grad(lambda q: jnp.sum(losses.divergence(q, sharp)))(
        jnp.asarray(Q)
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_candidate_offsets_cancel_but_give_sampled_ids_the_weight_of_those_left_out():
    """The mean over samples of ids is the divergence over the whole vocabulary (3 %)."""
    vocab, rng = 300, np.random.default_rng(1)
    p, q = (0.5 * rng.normal(size=vocab) for _ in "pq")
    p[:10] += 2.0
    whole = (softmax(p) * np.log(softmax(p) / softmax(q))).sum()
    labels, often = np.zeros((1, 1, 1), np.int32), np.arange(10)
    drawn = [head.choose_candidates(labels, often, 100, vocab, rng) for _ in range(200)]
    listed = [
        jnp.asarray([[[x[np.asarray(c.ids)] + np.asarray(c.offsets)]] for c in drawn], jnp.float32)
        for x in (q, p)
    ]
    found = losses.divergence(*listed)
    assert float(jnp.mean(found)) == pytest.approx(whole, rel=0.03)


def test_overlap_best_in_teacher_and_the_expected_run_follow_their_formulas():
    p, q = softmax(P), softmax(Q)
    kept = losses.overlap(jnp.asarray(Q), jnp.asarray(P))
    np.testing.assert_allclose(kept, np.minimum(p, q).sum(-1), rtol=1e-5)
    best = losses.best_in_teacher(jnp.asarray(Q), jnp.asarray(P))
    np.testing.assert_allclose(
        best, np.take_along_axis(p, Q.argmax(-1)[..., None], -1)[..., 0], rtol=1e-5
    )
    rates = jnp.asarray([[[0.5, 0.5, 0.25]]])
    assert losses.expected_run(rates, jnp.ones((1, 1, 3), bool)).tolist() == [[1.8125]]
    assert losses.expected_run(rates, jnp.asarray([[[True, False, True]]])).tolist() == [[1.5]]


def test_minus_log_overlap_falls_along_its_slope_and_is_finite_where_nothing_overlaps():
    """Fault 125: a log of 0."""
    q, p = jnp.asarray(Q, jnp.float32), jnp.asarray(P)
    slope = np.asarray(jax.grad(lambda x: jnp.sum(losses.log_overlap(x, p)))(q))
    step = RNG.normal(size=Q.shape).astype(np.float32)

    def expected(x):
        return -np.log(np.minimum(softmax(x), softmax(P)).sum(-1)).sum()

    across = (expected(Q + 1e-4 * step) - expected(Q - 1e-4 * step)) / 2e-4
    assert float((slope * step).sum()) == pytest.approx(across, rel=2e-2)
    assert not np.asarray(jax.grad(lambda x: jnp.sum(losses.log_overlap(q, x)))(p)).any()
    apart = [jnp.zeros((1, 1, 1, 11)).at[..., n].set(2000.0) for n in (0, 1)]
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(losses.log_overlap(x, apart[1])))(
        apart[0]
    )
    assert float(value) == pytest.approx(-np.log(1e-4)) and np.isfinite(gradient).all()


def test_the_teacher_of_slot_o_is_the_target_after_position_a_plus_o_minus_1(model, pair, truth):
    """Fault 120: final states equal to the position number, and the target's own distribution."""
    documents, anchors, batch = pair
    count = len(documents[1].ids)
    numbered = documents[1]._replace(final=np.arange(count)[:, None].astype(jnp.bfloat16))
    alone = build_batch([numbered], [anchors[1]], width=WIDTH, quota=4)
    rows = np.asarray(alone.final, np.float32)[0, :, :, 0].tolist()
    assert rows == [[4, 5, 6], [9, 10, 11], [17, 18, 0], [0, 0, 0]]
    logits = np.asarray(batch.final, np.float32) @ np.asarray(model.head).T
    for place, p in truth[0].items():
        np.testing.assert_allclose(softmax(logits[place]), p, atol=2e-3)


@pytest.mark.parametrize(
    "loss, overlap", [("distill", 0.0), ("distill_dpace", 0.0), ("distill_dpace", 0.4)]
)
def test_the_loss_of_a_batch_is_the_mix_under_the_slot_weights(
    model, drafter, pair, truth, loss, overlap
):
    (documents, anchors, batch), (p, q) = pair, truth
    share, gamma = 0.7, 2.0
    options = tiny.options(
        block_size=WIDTH, loss=loss, distill_weight=share, overlap_weight=overlap, gamma=gamma
    )
    hard, mixed = np.zeros((2, 3, 3)), np.zeros((2, 3, 3))
    for row, block, slot in p:
        place = row, block, slot
        label = documents[row].ids[anchors[row][block] + slot + 1]
        hard[place] = -np.log(q[place][label])
        soft = (p[place] * np.log(p[place] / q[place])).sum()
        soft = (1 - overlap) * soft - overlap * np.log(np.minimum(p[place], q[place]).sum())
        mixed[place] = (1 - share) * hard[place] + share * soft
    scored = np.asarray(batch.scored)
    assert sorted(p) == sorted(map(tuple, np.argwhere(scored).tolist()))
    weights = np.broadcast_to(np.exp(-np.arange(3) / gamma), scored.shape)
    if loss == "distill_dpace":
        weights = dpace_weights(np.exp(-hard), scored)
    expected = (weights * mixed)[scored].sum() / weights[scored].sum()
    got = objective.block_sums(
        drafter, batch, None, model.embedding, model.head, width=WIDTH, options=options
    ).mean_loss
    # The teacher's hidden states are bfloat16 on disk.
    assert float(got) == pytest.approx(expected, rel=2e-3)


def test_held_out_figures_at_temperature_one_are_sums_over_blocks(model, drafter, pair, truth):
    (*_, batch), (p, q) = pair, truth
    kept, best = np.zeros((2, 3, 3)), np.zeros((2, 3, 3))
    for place in p:
        kept[place] = np.minimum(p[place], q[place]).sum()
        best[place] = p[place][q[place].argmax()]
    found = objective.measure(drafter, batch, model.embedding, model.head, width=WIDTH)
    assert found.sampled is not None and float(found.anchors) == 5
    np.testing.assert_allclose(found.sampled.by_slot, kept.sum((0, 1)), rtol=2e-3)
    for got, rates in ((found.sampled.runs, kept), (found.sampled.best_runs, best)):
        assert float(got) == pytest.approx(5 + np.cumprod(rates, -1).sum(), rel=2e-3)


def test_a_distilling_run_ends_with_figures_and_documents_without_a_teacher_are_refused(
    model, tmp_path
):
    options = tiny.options(
        steps=1, held_out=0.6, loss="distill", full_head_from=1.0, narrow_until=0.0
    )
    documents = tiny.documents(model, final=True)
    held = train(model, documents, tmp_path / "run", options).held_out
    assert held is not None and held.sampled_by_slot is not None
    assert all(0.0 < share < 1.0 for share in held.sampled_by_slot)
    assert held.accepted_sampled is not None and 1.0 < held.accepted_sampled < 4.0
    spoiled = [documents[0]._replace(final=None), *documents[1:]]
    with pytest.raises(ConfigError, match="1 of 7 documents have no final hidden states"):
        train(model, spoiled, tmp_path / "other", options)
