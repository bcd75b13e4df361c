"""Tests of `training/options.py`: what contradicts itself, and the drafter's shape."""

import pytest

import tiny_training as tiny
from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.training.options import check_options, drafter_config

TARGET = TargetConfig.from_dict(tiny.RAW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pack": 2},
            "accumulate 1 x 2 devices x pack 2: use a multiple of 4",
        ),
        ({"pack": 0, "anchor_chunk": -1}, "pack 0: at least 1; anchor_chunk -1: at least 0"),
        ({"gamma": 0.0, "clip": -1.0}, "gamma 0.0: above 0; clip -1.0: above 0"),
    ],
)
def test_numbers_of_a_step_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_options(tiny.options(**changes), devices=2)


def test_a_sliding_window_is_the_drafters_in_every_layer():
    config = drafter_config(TARGET, tiny.options(sliding_window=9))
    assert config.windows == (9, 9) and config.causal == (True, True)
    assert tiny.options().with_shape_of(config).sliding_window == 9
    with pytest.raises(ConfigError, match="sliding_window 3 is shorter than a block of 4"):
        drafter_config(TARGET, tiny.options(sliding_window=3))
