"""Tests of `training/export.py`: what is written loads again, here and by another reader."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import tiny_training as tiny
from dflash_jax.config import DrafterConfig
from dflash_jax.errors import CheckpointError
from dflash_jax.training import export
from dflash_jax.training.options import drafter_config
from dflash_jax.training.start import start_drafter
from dflash_jax.training.step import drafter_params
from dflash_jax.weights.load import load_drafter


@pytest.fixture(scope="module")
def drafter():
    model = tiny.target()
    config = drafter_config(model.config, tiny.options(intermediate_size=20))
    return start_drafter(config, model, init="random", seed=0)


def test_an_export_loads_again_with_its_config_and_bfloat16_parameters(drafter, tmp_path):
    export.export_drafter(drafter, tmp_path / "d", "card")
    again = load_drafter(tmp_path / "d", dtype="float32")
    assert again.config == drafter.config
    params, loaded = drafter_params(drafter), drafter_params(again)
    assert params.keys() == loaded.keys()
    for name, value in params.items():
        rounded = np.asarray(value).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(loaded[name], rounded, err_msg=name)


def test_an_export_of_a_loaded_drafter_is_the_same_to_the_byte(drafter, tmp_path):
    """Fault 129: round trip of tensors and config."""
    export.export_drafter(drafter, tmp_path / "a", "card")
    export.export_drafter(load_drafter(tmp_path / "a", dtype="float32"), tmp_path / "b", "card")
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_another_reader_finds_the_published_names_shapes_and_keys(drafter, tmp_path):
    export.export_drafter(drafter, tmp_path / "d", "card")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    width, inner = 16, 20
    assert {name: t.shape for name, t in tensors.items() if "layers.1" not in name} == {
        "fc.weight": (width, 2 * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "layers.0.input_layernorm.weight": (width,),
        "layers.0.post_attention_layernorm.weight": (width,),
        "layers.0.self_attn.q_proj.weight": (16, width),
        "layers.0.self_attn.k_proj.weight": (8, width),
        "layers.0.self_attn.v_proj.weight": (8, width),
        "layers.0.self_attn.o_proj.weight": (width, 16),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
    }
    assert {t.dtype for t in tensors.values()} == {np.dtype(jnp.bfloat16)}
    up = np.asarray(drafter.layers[0].mlp.up_proj.weight[...]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(tensors["layers.0.mlp.up_proj.weight"], up.T)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    assert DrafterConfig.from_dict(config) == drafter.config


def test_an_export_that_is_too_large_leaves_the_old_one(drafter, tmp_path):
    export.export_drafter(drafter, tmp_path / "d", "old")
    with pytest.raises(CheckpointError, match=r"takes \d+ bytes, more than the 100 allowed"):
        export.export_drafter(drafter, tmp_path / "d", "new", max_bytes=100)
    assert (tmp_path / "d" / "README.md").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def test_the_card_says_data_recipe_figures_licence_and_target(drafter):
    card = export.model_card(
        drafter,
        target="Tiny",
        target_licence="Apache-2.0",
        data={"answers": 12},
        recipe={"steps": 30},
        figures={"accepted run": 1.5},
    )
    assert card.startswith("---\nlicense: apache-2.0\n")
    for line in (
        "- answers: 12",
        "- steps: 30",
        "- accepted run: 1.5",
        "## Figures",
        "Target: Tiny (Apache-2.0)",
        "Proposes 3 tokens",
        "mask id 60",
    ):
        assert line in card
