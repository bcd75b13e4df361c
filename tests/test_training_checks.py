"""Tests of `training/checks.py`: what no run can have is refused before anything is read."""

import dataclasses
import math
import typing
from typing import Any, Literal

import pytest

import tiny_training as tiny
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.training.checks import checked_run
from dflash_jax.training.options import TrainOptions, drafter_config

TARGET = TargetConfig.from_dict(tiny.RAW)
HINTS = typing.get_type_hints(TrainOptions)
NUMBERS = [n for n, hint in HINTS.items() if {int, float} & {hint, *typing.get_args(hint)}]
CHOICES = [n for n, hint in HINTS.items() if typing.get_origin(hint) is Literal]


def _refused(message: str, *, devices: int = 1, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_run(TARGET, tiny.options(**changes), devices=devices)


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        ({"documents_per_step": 6, "accumulate": 4}, 1, "documents_per_step 6 .* multiple of 4"),
        ({"documents_per_step": 4, "accumulate": 2}, 4, r"2 x 4 devices: use a multiple of 8"),
        ({"pack": 2}, 2, "accumulate 1 x 2 devices x pack 2: use a multiple of 4"),
        ({"steps": 0, "save_every": 0}, 1, "steps 0: at least 1; save_every 0: at least 1"),
        ({"pack": 0, "anchor_chunk": -1}, 1, "pack 0: at least 1; anchor_chunk -1: at least 0"),
        ({"gamma": 0.0, "clip": -1.0}, 1, "gamma 0.0: above 0; clip -1.0: above 0"),
        ({"schedule": "wsd", "warmup": 0.5, "decay_share": 0.6}, 1, "leave no step of 10"),
        ({"distill_weight": 1.5}, 1, r"distill_weight 1.5: a share, 0 \(labels only\) to 1"),
        ({"overlap_weight": -0.1}, 1, "overlap_weight -0.1: a share"),
        ({"patience": 2}, 1, "patience 2 needs held-out documents, and held_out is 0"),
        ({"draft_vocab": 62}, 1, "a draft vocabulary of 62 ids: the target has 61, give 1 to 61"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(
    changes: dict[str, Any], devices: int, message: str
):
    _refused(message, devices=devices, **changes)


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_may_be_below_what_it_counts(name):
    below: dict[str, Any] = {name: -1.0 if HINTS[name] is float else -1}
    _refused(rf"{name.replace('draft_vocab', 'draft vocabulary')}\D* -1\b", **below)


@pytest.mark.parametrize("name", [n for n in NUMBERS if HINTS[n] is float])
def test_a_nan_is_no_number(name):
    no_number: dict[str, Any] = {name: math.nan}
    _refused(rf"{name} nan: ", **no_number)


@pytest.mark.parametrize("name", CHOICES)
def test_a_word_that_is_none_of_the_choices_is_not_taken_for_one(name):
    options = tiny.options()
    object.__setattr__(options, name, "nothing")  # as untyped callers may; tests are type-checked
    choices = ", ".join(typing.get_args(HINTS[name]))
    with pytest.raises(ConfigError, match=f"{name} 'nothing': one of {choices}"):
        checked_run(TARGET, options)


def test_the_drafter_to_go_on_from_holds_and_must_be_this_targets():
    options = tiny.options(num_layers=5, block_size=9)
    begin = drafter_config(TARGET, tiny.options())
    config, held = checked_run(TARGET, options, begin_with=begin)
    assert config == begin and (held.num_layers, held.block_size) == (2, 4)

    def refused(message: str, **changes: Any) -> None:
        other: DrafterConfig = dataclasses.replace(begin, **changes)
        with pytest.raises(ConfigError, match=message):
            checked_run(TARGET, options, begin_with=other)

    refused("made for a target of 9 layers and this one has 6", num_target_layers=9)
    refused("reduced vocabulary or its own .* is not trained", draft_vocab_size=20)
    refused("reduced vocabulary or its own .* is not trained", has_lm_head=True)
