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


def test_time_is_arithmetic_over_rate():
    plan = _plan(tiny.options(steps=10))
    assert plan.seconds(1e9) == pytest.approx((10 * plan.flops_per_step + plan.feature_flops) / 1e9)
    assert plan.feature_flops == 2 * 12_704 * 30 * 64  # the tiny target's parameters
