"""Tests of `training/trainer.py` and what it runs: resume, frozen target, guards, order of data."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.errors import ConfigError
from dflash_jax.training import batches, step
from dflash_jax.training.blocks import build_batch
from dflash_jax.training.options import TrainingError, TrainOptions, drafter_config
from dflash_jax.training.start import start_drafter
from dflash_jax.training.trainer import train


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def documents(model):
    return tiny.documents(model)


def test_a_run_logs_every_ten_steps_and_measures_held_out_documents(model, documents, tmp_path):
    options = tiny.options(
        steps=20, held_out=0.6, evaluate_every=20, save_every=20, narrow_until=0.1
    )
    trained = train(model, documents, tmp_path, options)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [10, 20]
    assert trained.held_out is not None and trained.held_out.anchors > 0
    assert 1.0 <= trained.held_out.accepted <= 4.0
    assert rows[-1]["held_out_accepted"] == f"{trained.held_out.accepted:.4f}"
    assert [row["width"] for row in rows] == ["4", "4"]


def test_a_run_can_begin_with_a_trained_drafter_and_keeps_its_config(model, documents, tmp_path):
    """Fault 129: the taps and widths are the loaded drafter's, not the options' defaults."""
    first = train(model, documents, tmp_path / "a", tiny.options(steps=2)).drafter
    options = tiny.options(steps=2, num_layers=1, block_size=8, learning_rate=0.0)
    second = train(model, documents, tmp_path / "b", options, begin_with=first).drafter
    assert second.config == first.config
    tiny.assert_same(tiny.params(first), tiny.params(second))
    record = json.loads((tmp_path / "b" / "options.json").read_text())
    assert (record["num_layers"], record["block_size"]) == (2, 4)


def test_the_optimiser_holds_the_draft_leaves_and_nothing_of_the_target(model, documents, tmp_path):
    """Fault 130: leaf counts, and the target's arrays are unchanged bit for bit."""
    before = [np.array(leaf) for leaf in jax.tree.leaves(jax.tree.map(np.array, _state(model)))]
    options = tiny.options()
    drafter = start_drafter(drafter_config(model.config, options), model, init="target", seed=0)
    state = step.initial_state(drafter, options)
    shapes = sorted(value.shape for value in state.params.values())
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sorted(moments) == sorted(2 * shapes)
    train(model, documents, tmp_path, options)
    after = [np.array(leaf) for leaf in jax.tree.leaves(_state(model))]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def _state(model):
    from flax import nnx

    return nnx.state(model)


def test_a_tied_head_is_the_embedding_itself_and_an_untied_one_is_not(model):
    """Fault 80: the array that training multiplies by is the target's own."""
    assert model.head is model.embedding
    untied = tiny.target(tie_word_embeddings=False)
    assert untied.head is untied.lm_head.weight[...]
    assert not np.array_equal(untied.head, untied.embedding)


def test_a_batch_without_an_anchor_leaves_the_weights_as_they_are(model):
    """Fault 123: only documents too short for a block."""
    options = tiny.options(full_head_from=0.0, weight_decay=0.1)
    drafter = start_drafter(drafter_config(model.config, options), model, init="random", seed=0)
    compiled = step.compile_step(step.abstract_of(drafter), options)
    before = tiny.params(drafter)
    short = tiny.document(model, 3, 2)
    batch = build_batch([short, short], [np.zeros(0, np.int32)] * 2, width=4, quota=3)
    state = step.initial_state(drafter, options)
    state, report = compiled(state, batch, None, model.embedding, model.head, width=4)
    assert float(report.loss) == 0.0 and bool(report.finite) and int(state.step) == 1
    tiny.assert_same(before, {name: np.asarray(value) for name, value in state.params.items()})


def test_features_that_are_not_finite_stop_the_run_and_are_named(model, documents, tmp_path):
    """Fault 124: one inf in one document; the checkpoint before it stays finite."""
    features = documents[2].features.copy()
    features[3, 1] = np.inf
    spoiled = list(documents)
    spoiled[2] = documents[2]._replace(features=features)
    options = tiny.options(save_every=1)
    with pytest.raises(TrainingError, match=r"step \d+: .*features of document 2 are not finite"):
        train(model, spoiled, tmp_path, options)


def test_a_packed_document_that_the_target_spoils_is_named(documents, tmp_path):
    """Fault 124, where features are computed for each step and documents share a row."""
    target, spoiler = tiny.target(tie_word_embeddings=False), tiny.MASK - 1
    table = target.embed_tokens.weight
    table[...] = table[...].at[spoiler].set(jnp.nan)
    bare = [d._replace(ids=np.where(d.ids == spoiler, 0, d.ids)) for d in documents]
    bare[2].ids[3] = spoiler
    options = tiny.options(features="computed", pack=2)
    said = r"step \d+: .*features of document 2 are not finite: the target gives them"
    with pytest.raises(TrainingError, match=said):
        train(target, bare, tmp_path, options)


def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments(model, documents):
    """Fault 124."""
    options = tiny.options(full_head_from=0.0)
    drafter = start_drafter(drafter_config(model.config, options), model, init="random", seed=0)
    compiled = step.compile_step(step.abstract_of(drafter), options)
    features = np.full_like(documents[0].features, np.nan)
    batch = build_batch(
        [documents[0]._replace(features=features)], [np.array([6, 8], np.int32)], width=4, quota=2
    )
    state = step.initial_state(drafter, options)
    before = jax.tree.map(np.array, state)
    state, report = compiled(state, batch, None, model.embedding, model.head, width=4)
    assert not bool(report.finite)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_norm_weights_near_one_move_under_a_small_rate(model, documents, tmp_path):
    """Fault 126: float32 parameters; a bfloat16 1.0 would not move by 1e-4."""
    options = tiny.options(steps=8, learning_rate=1e-4, init="random")
    drafter = train(model, documents, tmp_path, options).drafter
    weight = np.asarray(drafter.norm.weight[...])
    assert weight.dtype == np.float32
    assert 0 < np.abs(weight - 1.0).max() < 2e-3


def test_an_epoch_visits_every_document_once_and_epochs_differ():
    lengths = np.arange(23)
    steps = [batches.documents_at(lengths, s, 4, seed=1).tolist() for s in range(12)]
    first, second = steps[:6], steps[6:]
    assert sorted(sum(first, [])) == list(range(23)) == sorted(sum(second, []))
    assert first != second
    assert steps[3] == batches.documents_at(lengths, 3, 4, seed=1).tolist()


def test_anchors_are_drawn_anew_every_epoch(model, documents):
    lengths = np.asarray([len(d.ids) for d in documents])
    drawn = {}
    for number in range(8):
        chosen, batch = batches.batch_at(
            documents, lengths, number, per_step=2, quota=3, width=4, seed=0
        )
        for index, anchors in zip(chosen, np.asarray(batch.anchors), strict=False):
            drawn.setdefault(int(index), []).append(tuple(anchors.tolist()))
    assert any(len(set(epochs)) > 1 for epochs in drawn.values())


def test_held_out_documents_stay_held_out_when_more_are_added(model, documents):
    train_some, held_some = batches.split_held_out(documents[:5], 0.6)
    train_all, held_all = batches.split_held_out(documents, 0.6)
    ids = {d.ids.tobytes() for d in held_all}
    assert held_some and {d.ids.tobytes() for d in held_some} <= ids
    assert not ids & {d.ids.tobytes() for d in train_all}
    assert len(train_some) + len(held_some) == 5


def test_started_from_the_target_the_layers_are_its_last_ones_and_fc_passes_the_deepest_tap(model):
    drafter = start_drafter(
        drafter_config(model.config, tiny.options()), model, init="target", seed=0
    )
    for i in range(2):
        np.testing.assert_array_equal(
            drafter.layers[i].mlp.up_proj.weight[...], model.layers[4 + i].mlp.up_proj.weight[...]
        )
    np.testing.assert_array_equal(drafter.norm.weight[...], model.norm.weight[...])
    np.testing.assert_array_equal(drafter.fc.weight[...][16:], np.eye(16, dtype=np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 61}, "mask_token_id 61 is outside the vocabulary of 61"),
        ({"block_size": 1}, "block_size 1: at least 2"),
        ({"num_layers": 7}, "num_layers 7 is more than the target's 6"),
        ({"num_taps": 5}, "num_taps 5 gives the layer ids"),
    ],
)
def test_options_that_do_not_fit_the_target_are_refused(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        drafter_config(model.config, TrainOptions(**(tiny.OPTIONS | changes)))


@pytest.mark.parametrize("numbers", [0, 16, 48], ids=["none", "one tap", "three taps"])
def test_features_that_are_not_those_of_the_taps_are_refused(
    model, documents, tmp_path, numbers: int
):
    """Documents that nobody cached features for, or cached for another drafter."""
    other = np.zeros((len(documents[1].ids), numbers), documents[1].features.dtype)
    spoiled = [documents[0], documents[1]._replace(features=other), *documents[2:]]
    message = (
        f"1 of {len(documents)} documents have features of {numbers} numbers a token, "
        "2 taps of 16 are 32"
    )
    with pytest.raises(ConfigError, match=message):
        train(model, spoiled, tmp_path / "run", tiny.options())
    assert not (tmp_path / "run" / "log.csv").exists()


def test_the_head_that_training_reads_has_no_gradient(model, documents):
    """Fault 130: neither embedding nor head is among what `train_step` returns or changes."""
    options = tiny.options(full_head_from=0.0)
    drafter = start_drafter(drafter_config(model.config, options), model, init="target", seed=0)
    compiled = step.compile_step(step.abstract_of(drafter), options)
    embed = jnp.array(model.embedding)
    kept = np.array(embed)
    batch = build_batch(documents[:1], [np.array([6], np.int32)], width=4, quota=1)
    state = step.initial_state(drafter, options)
    compiled(state, batch, None, embed, embed, width=4)
    np.testing.assert_array_equal(kept, embed)
