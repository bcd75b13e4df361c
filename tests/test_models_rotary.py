"""Rotary frequencies against the published formulas, and whose config decides which rotation.

The formulas are written out here one frequency at a time, in plain Python, from their sources.
"""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.config import RopeConfig
from dflash_jax.models.rotary import amplitude, inverse_frequencies, rotate, rotations
from tiny import write_drafter, write_target

IDS = jnp.asarray([5, 17, 3, 88, 40, 2], jnp.int32)
YARN = RopeConfig(
    theta=150000.0,
    kind="yarn",
    factor=32.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
)
LLAMA3 = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def plain_frequency(theta: float, size: int, i: int) -> float:
    return 1.0 / theta ** (2 * i / size)


def llama3_frequency(size: int, i: int) -> float:
    """The three ranges of the Llama 3.1 release: short waves stay, long ones stretch, between mix.

    A wavelength under 8192 / 4 stays; one over 8192 / 1 is 8 times as long.
    """
    frequency = plain_frequency(500000.0, size, i)
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4.0:
        return frequency
    if wavelength > 8192 / 1.0:
        return frequency / 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def yarn_frequency(size: int, i: int) -> float:
    """Peng et al. 2023, section 3.2: ramp between 32 turns and 1 turn in 4096 positions."""

    def index_of(turns: float) -> float:
        return size * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(150000.0))

    low, high = math.floor(index_of(32.0)), math.ceil(index_of(1.0))
    share = min(max((i - low) / (high - low), 0.0), 1.0)
    frequency = plain_frequency(150000.0, size, i)
    return frequency / 32.0 * share + frequency * (1 - share)


def listed(one, size: int) -> np.ndarray:
    return np.array([one(size, i) for i in range(size // 2)])


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
def test_a_config_without_scaling_gives_the_plain_frequencies(theta, size):
    """Fault 41."""
    expected = listed(lambda d, i: plain_frequency(theta, d, i), size)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta), size), expected, rtol=1e-12)


def test_linear_scaling_divides_every_frequency():
    rope = RopeConfig(10000.0, "linear", factor=4.0)
    expected = listed(lambda d, i: plain_frequency(10000.0, d, i) / 4.0, 64)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [64, 128])
def test_llama3_scaling_follows_its_three_ranges(size):
    expected = listed(llama3_frequency, size)
    np.testing.assert_allclose(inverse_frequencies(LLAMA3, size), expected, rtol=1e-12)
    plain = listed(lambda d, i: plain_frequency(500000.0, d, i), size)
    ratios = plain / expected
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(8.0)
    assert any(1.01 < ratio < 7.9 for ratio in ratios), "the mixed range is tested too"


@pytest.mark.parametrize("size", [64, 128])
def test_yarn_scaling_follows_the_paper(size):
    """Fault 41."""
    expected = listed(yarn_frequency, size)
    np.testing.assert_allclose(inverse_frequencies(YARN, size), expected, rtol=1e-12)


def test_the_yarn_amplitude_is_the_papers_unless_the_config_gives_one():
    assert amplitude(YARN) == pytest.approx(1 + 0.1 * math.log(32.0))
    given = RopeConfig(1e4, "yarn", factor=64.0, attention_factor=1.25)
    assert amplitude(given) == 1.25
    assert amplitude(RopeConfig(1e4)) == amplitude(LLAMA3) == 1.0


def test_a_rule_without_its_numbers_is_refused_by_name():
    with pytest.raises(dj.ConfigError, match="'linear' needs 'factor'"):
        inverse_frequencies(RopeConfig(1e4, "linear"), 16)


@pytest.mark.parametrize("rope", [RopeConfig(1e4), LLAMA3, YARN], ids=lambda rope: rope.kind)
def test_cosines_and_sines_are_those_of_position_times_frequency(rope):
    positions = np.array([[0, 1, 7], [100, 101, 4095]], np.int32)
    cos, sin = rotations(rope, 32, jnp.asarray(positions))
    frequencies = inverse_frequencies(rope, 32)
    for b, t in np.ndindex(positions.shape):
        angles = [int(positions[b, t]) * float(f) for f in frequencies]
        scale = amplitude(rope)
        # float32 angles of thousands of radians keep about 1e-4.
        np.testing.assert_allclose(cos[b, t], [math.cos(a) * scale for a in angles], atol=1e-3)
        np.testing.assert_allclose(sin[b, t], [math.sin(a) * scale for a in angles], atol=1e-3)


def test_the_first_half_of_a_head_turns_with_the_second():
    """The pair is (i, i + d/2), not (2i, 2i + 1): a quarter turn of pair 0 of a head of 4."""
    x = jnp.asarray([1.0, 10.0, 2.0, 20.0]).reshape(1, 1, 1, 4)
    cos, sin = jnp.asarray([[[0.0, 1.0]]]), jnp.asarray([[[1.0, 0.0]]])
    np.testing.assert_allclose(rotate(x, cos, sin).ravel(), [-2.0, 10.0, 1.0, 20.0])


def written(folder: Path, target_theta: float, draft_theta: float):
    """Logits of a target, and its drafter's context keys for fixed features."""
    target = dj.load_target(write_target(folder / "t", rope_theta=target_theta))
    drafter = dj.load_drafter(write_drafter(folder / "d", rope_theta=draft_theta))
    features = np.random.default_rng(0).standard_normal((1, 6, 64)).astype(np.float32)
    positions = jnp.arange(6, dtype=jnp.int32)[None, :]
    keys = drafter.context_kv(jnp.asarray(features), positions)[0].keys
    return np.asarray(target.forward(IDS)[0]), np.asarray(keys)


def test_each_model_turns_by_its_own_config(tmp_path):
    """Fault 39: theta changed in one config changes that model only."""
    logits, keys = written(tmp_path / "same", 1e4, 1e4)
    of_target, kept_keys = written(tmp_path / "target", 1e2, 1e4)
    assert np.abs(of_target - logits).max() > 1e-2
    np.testing.assert_array_equal(kept_keys, keys)
    kept_logits, of_draft = written(tmp_path / "draft", 1e4, 1e2)
    np.testing.assert_array_equal(kept_logits, logits)
    assert np.abs(of_draft - keys).max() > 1e-2
