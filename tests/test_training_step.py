"""Tests of `training/step.py`, `training/optimizer.py` and what they take from the options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training as tiny
from dflash_jax.errors import ConfigError
from dflash_jax.training import step
from dflash_jax.training.blocks import build_batch
from dflash_jax.training.optimizer import learning_rate
from dflash_jax.training.options import TrainOptions, drafter_config
from dflash_jax.training.start import start_drafter


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def batch(model):
    """Four documents of 3, 1, 0 and 2 anchors: parts that weigh differently."""
    documents = [tiny.document(model, 20, 4, seed=i, ended=i == 1) for i in range(4)]
    anchors = [np.array(a, np.int32) for a in ([5, 7, 12], [18], [], [6, 9])]
    return build_batch(documents, anchors, width=4, quota=3)


def _step(model, batch, *, times=1, **changes):
    options = tiny.options(documents_per_step=4, init="random", warmup=0.0, **changes)
    drafter = start_drafter(drafter_config(model.config, options), model, init="random", seed=0)
    compiled = step.compile_step(step.abstract_of(drafter), options)
    state = step.initial_state(drafter, options)
    tables = [t.astype(options.compute_dtype) for t in (model.embedding, model.head)]
    for _ in range(times):
        state, report = compiled(state, batch, None, *tables, width=4)
    return state, report


@pytest.mark.parametrize("loss", ["decayed", "dpace"])
def test_a_step_in_parts_has_the_figures_of_the_whole_step(model, batch, loss):
    """Fault 76: neither the logged loss nor the gradient is multiplied by the number of parts.

    One part has no anchor at all; a mean of the parts' means would differ by tens of per cent.
    """
    whole, one = _step(model, batch, loss=loss, learning_rate=0.0)
    parts, other = _step(model, batch, loss=loss, learning_rate=0.0, accumulate=4)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    # The moments are the gradient and its square, scaled.
    leaves = jax.tree.leaves(whole.opt_state), jax.tree.leaves(parts.opt_state)
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert max(np.abs(leaf).max() for leaf in leaves[0]) > 1e-3


def test_a_bfloat16_pass_moves_float32_weights(model, batch):
    """Fault 126: a bfloat16 norm weight of 1.0 would not move by 1e-4."""
    exact = _step(model, batch)[1]
    state, report = _step(model, batch, times=8, learning_rate=1e-4, compute_dtype="bfloat16")
    first = _step(model, batch, compute_dtype="bfloat16")[1]
    arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    assert {x.dtype for x in arrays} == {jnp.dtype("float32")}
    moved = np.abs(np.asarray(state.params["norm.weight"]) - 1.0)
    assert 0 < moved.max() < 2e-3
    assert float(first.loss) != float(exact.loss)
    assert float(first.loss) == pytest.approx(float(exact.loss), rel=2e-2)
    assert bool(report.finite)


def _at(rate, step: int) -> float:
    return float(np.asarray(rate(step)))


def test_rates_warm_up_and_end_at_zero():
    wsd = TrainOptions(0, steps=100, learning_rate=1.0, warmup=0.1, schedule="wsd", decay_share=0.2)
    rate = learning_rate(wsd)
    expected = {0: 0.0, 5: 0.5, 10: 1.0, 45: 1.0, 80: 1.0, 90: 0.5, 95: 0.25, 100: 0.0}
    assert {at: pytest.approx(_at(rate, at), abs=1e-6) for at in expected} == expected
    cosine = learning_rate(TrainOptions(0, steps=100, learning_rate=1.0, warmup=0.1))
    for at in (10, 55, 77, 100):
        wave = 0.5 * (1 + np.cos(np.pi * (at - 10) / 90))
        assert _at(cosine, at) == pytest.approx(wave, abs=1e-6)
    assert _at(cosine, 5) == pytest.approx(0.5)


def test_a_mesh_without_the_axis_of_documents_is_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    with pytest.raises(ConfigError, match=r"axes \('tensor',\): .* named 'data'"):
        step.devices_of(mesh)
