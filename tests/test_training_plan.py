"""Tests of `training/plan.py` against what a run allocates and against products counted by hand."""

import jax
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.config import TargetConfig
from dflash_jax.training import step
from dflash_jax.training.options import drafter_config
from dflash_jax.training.plan import plan_training
from dflash_jax.training.start import start_drafter

TARGET = TargetConfig.from_dict(tiny.RAW)


def _plan(options, **changes):
    config = drafter_config(TARGET, options)
    return plan_training(TARGET, config, options, documents=30, longest=64, **changes)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_and_moments_are_those_of_a_run_to_the_byte(optimizer):
    model, options = tiny.target(), tiny.options(optimizer=optimizer, init="random")
    drafter = start_drafter(drafter_config(TARGET, options), model, init="random", seed=0)
    state = step.initial_state(drafter, options)
    shapes = {x.shape for x in state.params.values()}
    moments = sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.shape in shapes)
    memory = _plan(options).memory
    assert memory["drafter weights"].nbytes == sum(x.nbytes for x in state.params.values())
    assert memory["moments"].nbytes == moments


def test_features_are_those_of_a_batch_and_of_all_text():
    plan = _plan(tiny.options(documents_per_step=4))
    rows = np.zeros((4, 64, 2 * 16), np.uint16)
    assert plan.memory["features of a batch"].nbytes == rows.nbytes
    assert plan.disk["features"].nbytes == 30 * 64 * 2 * 16 * 2
    assert plan.needed == sum(amount.nbytes for amount in plan.memory.values())


def test_parts_and_devices_divide_what_they_should():
    """Parts divide activations alone; devices divide the work and the features too."""
    whole, parts, two = (
        _plan(tiny.options(documents_per_step=8, accumulate=a), devices=d)
        for a, d in ((1, 1), (4, 1), (1, 2))
    )
    name = "activations (estimate)"
    assert parts.memory[name].nbytes * 4 == whole.memory[name].nbytes
    assert parts.flops_per_step == pytest.approx(whole.flops_per_step)
    assert two.memory[name].nbytes * 2 == whole.memory[name].nbytes
    assert two.flops_per_step * 2 == pytest.approx(whole.flops_per_step)
    features = [plan.memory["features of a batch"].nbytes for plan in (whole, parts, two)]
    assert features == [features[0], features[0], features[0] // 2]


def test_computed_features_take_no_disk_and_a_target_pass_at_every_step():
    plan = _plan(tiny.options(features="computed", loss="distill"))
    assert plan.disk["features"].nbytes == 0
    assert plan.feature_flops == 2 * 12_704 * 10 * 2 * 64
    assert plan.memory["features of a batch"].nbytes == 2 * 64 * (2 + 1) * 16 * 2


def test_chunks_keep_fewer_scores_and_compute_a_pass_more_and_packed_rows_are_longer():
    """2 heads, 2 layers; 4 documents x 8 blocks of 4, 64 rows of context each."""
    whole, parts, packed = (
        _plan(tiny.options(documents_per_step=4, anchors_per_document=8, **changes))
        for changes in ({}, {"anchor_chunk": 2}, {"pack": 2})
    )
    name = "activations (estimate)"
    rows = 4 * (8 * 16 + 3 * 24)

    def scores(slots, keys):
        return 2 * (2 * 4 * slots * keys * 2 + rows * slots)

    saved = scores(128, 64 + 32) - scores(32, 64 + 8) - 4 * 128 * 16
    assert whole.memory[name].nbytes - parts.memory[name].nbytes == saved
    longer = packed.memory[name].nbytes - whole.memory[name].nbytes
    assert longer == scores(128, 2 * (64 + 32)) - scores(128, 64 + 32)
    assert parts.flops_per_step > whole.flops_per_step < packed.flops_per_step


def test_time_is_arithmetic_over_rate():
    plan = _plan(tiny.options(steps=10))
    assert plan.seconds(1e9) == pytest.approx((10 * plan.flops_per_step + plan.feature_flops) / 1e9)
    assert plan.feature_flops == 2 * 12_704 * 30 * 64  # the tiny target's parameters


def test_the_held_out_measure_counts_where_it_is_more_than_a_step():
    """Few anchors, few rows of the head: what is measured is of every id."""
    small = {"anchors_per_document": 1, "documents_per_step": 8, "draft_vocab": 2}
    name = "activations (estimate)"
    without, held, parts, taught = (
        _plan(tiny.options(**small | changes)).memory[name]
        for changes in (
            {},
            {"held_out": 0.2},
            {"held_out": 0.2, "accumulate": 2},
            {"held_out": 0.2, "keep_final": True},
        )
    )
    assert held.nbytes == 2 * 4 * 8 * 16 * 3 * tiny.VOCAB > without.nbytes
    assert held.formula == "held-out measure: 384 slots x 61 logits x 2 x 4"
    assert taught.nbytes == 2 * held.nbytes == 4 * parts.nbytes


def test_a_reduced_vocabulary_has_so_many_logits():
    many, few = (_plan(tiny.options(draft_vocab=n)) for n in (40, 10))
    name = "activations (estimate)"
    slots = 2 * 3 * 4
    assert many.memory[name].nbytes - few.memory[name].nbytes == 2 * 4 * slots * 30
    assert many.flops_per_step > few.flops_per_step
