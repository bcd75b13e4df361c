"""`ServeConfig`: the designed fields and defaults, and records that cannot be changed."""

import dataclasses

import pytest

import dflash_jax as dj
from published_configs import QWEN2, drafter, target


def test_serve_config_has_the_designed_fields_and_defaults():
    assert dataclasses.asdict(dj.ServeConfig()) == {
        "max_seq_len": None,
        "max_batch_size": None,
        "max_num_tokens": None,
        "max_draft_len": None,
        "speculation": None,
        "adaptive": False,
        "kv_layout": "contiguous",
        "context_store": "arena",
        "page_size": 32,
        "attention": "auto",
        "draft_attention": "auto",
        "allocation_order": "arena_first",
        "kv_memory_fraction": 0.9,
        "kv_max_tokens": None,
        "kv_max_bytes": None,
        "device_memory": None,
        "headroom": "measured",
        "skip_context_budget_check": False,
        "allow_token_limited": False,
        "allow_unqualified": False,
        "prefix_reuse": True,
        "rounds_per_step": 1,
        "dtype": "auto",
        "mesh": None,
        "rope_scaling": None,
    }


@pytest.mark.parametrize("record", [dj.ServeConfig(), target(QWEN2), drafter()])
def test_records_cannot_be_changed(record):
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, 1)
