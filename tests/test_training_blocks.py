"""Tests of `training/blocks.py`: anchors, labels, masks, and training that computes as serving.

The oracles are hand-written positions and `DFlashDrafter.forward`, which the golden vectors hold.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.training import blocks
from dflash_jax.training.blocks import build_batch, eligible_anchors, sample_anchors
from dflash_jax.training.documents import Document
from dflash_jax.training.options import drafter_config
from dflash_jax.training.start import start_drafter

WIDTH = 4


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def drafter(model):
    config = drafter_config(model.config, tiny.options(block_size=WIDTH))
    return start_drafter(config, model, init="random", seed=3)


def _hidden(drafter, model, batch):
    return np.asarray(blocks.hidden_of_blocks(drafter, batch, model.embedding, WIDTH))


def test_a_block_does_not_see_features_at_or_after_its_anchor(drafter, model):
    """Fault 119: with overlapping blocks at 4 and 6, features from 6 on reach neither."""
    document = tiny.document(model, 14, 2)
    anchors = [np.array([4, 6], np.int32)]
    before = _hidden(drafter, model, build_batch([document], anchors, width=WIDTH, quota=2))
    changed = document.features.copy()
    changed[6:] = 100.0
    after = _hidden(
        drafter,
        model,
        build_batch([document._replace(features=changed)], anchors, width=WIDTH, quota=2),
    )
    np.testing.assert_array_equal(before, after)
    changed[5] = 100.0
    seen = _hidden(
        drafter,
        model,
        build_batch([document._replace(features=changed)], anchors, width=WIDTH, quota=2),
    )
    np.testing.assert_array_equal(before[:, 0], seen[:, 0])
    assert np.abs(before[:, 1] - seen[:, 1]).max() > 1e-3


def test_a_block_does_not_see_another_block_of_its_document(drafter, model):
    document = tiny.document(model, 14, 2)
    alone = build_batch([document], [np.array([6], np.int32)], width=WIDTH, quota=1)
    beside = build_batch([document], [np.array([5, 6], np.int32)], width=WIDTH, quota=2)
    np.testing.assert_allclose(
        _hidden(drafter, model, beside)[:, 1], _hidden(drafter, model, alone)[:, 0], atol=1e-6
    )


def test_slot_k_is_scored_against_the_token_k_after_the_anchor():
    """Fault 120: features equal to the position number, read beside labels and mask."""
    length = 12
    positions = np.arange(length, dtype=np.int32)
    features = positions[:, None].astype(jnp.bfloat16)
    document = Document(positions, 3, True, features)
    batch = build_batch([document], [np.array([3, 9])], width=WIDTH, quota=3, multiple=1)
    assert np.asarray(batch.anchors).tolist() == [[3, 9, 0]]
    assert np.asarray(batch.anchor_ids).tolist() == [[3, 9, 0]]
    assert np.asarray(batch.labels).tolist() == [[[4, 5, 6], [10, 11, 0], [0, 0, 0]]]
    assert np.asarray(batch.scored).tolist() == [[[True] * 3, [True, True, False], [False] * 3]]
    assert np.asarray(batch.features, np.float32)[0, :, 0].tolist() == list(range(9))
    seen = blocks.context_masks(
        drafter_config(tiny.target().config, tiny.options()), jnp.asarray(batch.anchors), 9, WIDTH
    )[0]
    assert np.asarray(seen).sum(2)[0].tolist() == [3] * 4 + [9] * 4 + [0] * 4
    ids = blocks.block_ids(jnp.asarray(batch.anchor_ids), tiny.MASK, WIDTH)
    assert ids[0, :4].tolist() == [3, tiny.MASK, tiny.MASK, tiny.MASK]
    assert blocks.block_positions(jnp.asarray(batch.anchors), WIDTH)[0, 4:8].tolist() == [
        9,
        10,
        11,
        12,
    ]


def test_an_anchor_is_an_answer_token_followed_by_an_answer_token():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1, 1, 0], bool)
    assert eligible_anchors(mask, 2, ended=True).tolist() == [2, 5, 6, 7]


@pytest.mark.parametrize(
    ("length", "cut", "ended"),
    [(1, [], []), (3, [], [0, 1]), (4, [0], [0, 1, 2]), (5, [0, 1], [0, 1, 2, 3])],
)
def test_a_cut_text_gives_whole_blocks_only_and_an_ended_one_blocks_past_its_end(
    length, cut, ended
):
    """Fault 123: lengths 1, B-1, B, B+1."""
    mask = np.ones(length, bool)
    assert eligible_anchors(mask, WIDTH, ended=False).tolist() == cut
    assert eligible_anchors(mask, WIDTH, ended=True).tolist() == ended
    assert eligible_anchors(~mask, WIDTH, ended=True).tolist() == []


def test_each_document_gets_its_own_quota_of_anchors():
    """Fault 122: documents of 20 and 200, quota 16."""
    for length, count in ((20, 16), (200, 16), (10, 7)):
        eligible = eligible_anchors(np.ones(length, bool), WIDTH, ended=False)
        chosen = sample_anchors(eligible, 16, np.random.default_rng(0))
        assert len(chosen) == count and len(set(chosen.tolist())) == count
        assert set(chosen.tolist()) <= set(eligible.tolist())


def test_training_gives_the_logits_of_serving(drafter, model):
    """Train = serve, to 1e-5, for every anchor of two documents of different length."""
    pair = [tiny.document(model, 13, 4, seed=1), tiny.document(model, 30, 2, seed=2)]
    anchors = [np.array([4, 7], np.int32), np.array([2, 11, 26], np.int32)]
    batch = build_batch(pair, anchors, width=WIDTH, quota=3)
    hidden = _hidden(drafter, model, batch)
    for row, (document, chosen) in enumerate(zip(pair, anchors, strict=True)):
        for index, anchor in enumerate(chosen.tolist()):
            ids = np.array([document.ids[anchor]] + [tiny.MASK] * (WIDTH - 1), np.int32)
            served, logits = drafter.forward(
                jnp.asarray(document.features[:anchor], jnp.float32),
                jnp.asarray(ids),
                anchor + jnp.arange(WIDTH, dtype=jnp.int32),
                model.embedding,
                model.head,
            )
            np.testing.assert_allclose(hidden[row, index], served, atol=1e-5)
            trained = jax.numpy.asarray(hidden[row, index]) @ model.head.T
            np.testing.assert_allclose(trained, logits, atol=1e-5)
