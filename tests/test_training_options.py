"""Tests of `training/options.py`: the drafter's shape."""

import pytest

import tiny_training as tiny
from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.training.options import drafter_config

TARGET = TargetConfig.from_dict(tiny.RAW)


def test_a_sliding_window_is_the_drafters_in_every_layer():
    config = drafter_config(TARGET, tiny.options(sliding_window=9))
    assert config.windows == (9, 9) and config.causal == (True, True)
    assert tiny.options().with_shape_of(config).sliding_window == 9
    with pytest.raises(ConfigError, match="sliding_window 3 is shorter than a block of 4"):
        drafter_config(TARGET, tiny.options(sliding_window=3))
