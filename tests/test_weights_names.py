"""Names, transposition, refusals and sharding rules, against tables written out by hand."""

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.weights import names
from weight_files import PAIRS, golden_config, golden_tensors

Q_PROJ = ("layers", 3, "self_attn", "q_proj", "weight")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_every_golden_tensor_name_comes_back_from_its_path(pair, kind):
    for name in golden_tensors(pair, kind):
        assert names.tensor_name(names.parameter_path(name), kind) == name


def test_layer_numbers_are_integers_and_the_prefix_goes():
    assert names.parameter_path("model.layers.3.self_attn.q_proj.weight") == Q_PROJ


def test_a_drafter_tensor_is_known_with_and_without_the_prefix():
    assert names.parameter_path("layers.3.self_attn.q_proj.weight") == Q_PROJ
    assert names.parameter_path("model.fc.weight") == names.parameter_path("fc.weight")


def test_the_head_of_a_target_has_no_prefix():
    assert names.tensor_name(("lm_head", "weight"), "target") == "lm_head.weight"
    assert names.tensor_name(("norm", "weight"), "target") == "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.o_proj.weight", True),
        ("model.layers.0.mlp.down_proj.weight", True),
        ("fc.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("norm.weight", False),
    ],
)
def test_only_projections_and_fc_are_transposed(name, transposed):
    assert names.is_transposed(names.parameter_path(name)) is transposed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("markov_head.markov_w1.weight", "Markov"),
        ("confidence_head.proj.weight", "confidence"),
        ("candidate_selector.proj.weight", "candidate selector"),
        ("layers.0.kv_conv.weight", "convolutions"),
        ("layers.0.self_attn.qkv_proj.weight", "split it into q_proj, k_proj and v_proj"),
        ("layers.0.mlp.up_proj.weight_scale_inv", "quantised"),
    ],
)
def test_an_unsupported_drafter_tensor_has_its_reason(name, reason):
    assert reason in (names.unsupported(name, "drafter") or "")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_no_published_tensor_is_unsupported(pair, kind):
    assert [names.unsupported(name, kind) for name in golden_tensors(pair, kind)] == [
        None for _ in golden_tensors(pair, kind)
    ]


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("embed_tokens.weight", (320, 64), ("tensor", None)),
        ("lm_head.weight", (320, 64), ("tensor", None)),
        ("layers.0.self_attn.q_proj.weight", (64, 128), (None, "tensor")),
        ("layers.0.self_attn.k_proj.weight", (64, 64), (None, "tensor")),
        ("layers.0.self_attn.v_proj.bias", (64,), ("tensor",)),
        ("layers.0.self_attn.o_proj.weight", (128, 64), ("tensor", None)),
        ("layers.0.self_attn.o_proj.bias", (64,), (None,)),
        ("layers.0.mlp.gate_proj.weight", (64, 160), (None, "tensor")),
        ("layers.0.mlp.down_proj.weight", (160, 64), ("tensor", None)),
        ("layers.0.self_attn.q_norm.weight", (32,), (None,)),
        ("norm.weight", (64,), (None,)),
        ("fc.weight", (128, 64), (None, None)),
        ("d2t", (32,), (None,)),
    ],
)
def test_heads_mlp_width_and_vocabulary_are_divided_and_the_rest_is_replicated(name, shape, spec):
    mesh = AbstractMesh((2,), ("tensor",))
    sharding = names.sharding_for(names.parameter_path(name), shape, mesh)
    assert sharding.spec == PartitionSpec(*spec)


def test_a_mesh_without_the_tensor_axis_replicates():
    mesh = AbstractMesh((2,), ("data",))
    assert names.sharding_for(Q_PROJ, (64, 127), mesh).spec == PartitionSpec(None, None)


def test_a_size_that_the_mesh_does_not_divide_is_refused_with_both_numbers():
    mesh = AbstractMesh((3,), ("tensor",))
    with pytest.raises(ConfigError, match=r"lm_head.weight has 320 .* the 3 devices .* 'tensor'"):
        names.sharding_for(("lm_head", "weight"), (320, 64), mesh)


def test_a_mesh_that_would_cut_heads_is_refused_with_every_size():
    config = TargetConfig.from_dict(golden_config("llama-tiny", "target"))  # 6/3 heads, MLP 96
    names.check_mesh(config, "target", AbstractMesh((3,), ("tensor",)))
    with pytest.raises(ConfigError) as refused:
        names.check_mesh(config, "target", AbstractMesh((5,), ("tensor",)))
    for finding in ("num_attention_heads=6", "num_key_value_heads=3", "intermediate_size=96"):
        assert f"{finding} over the 5 devices" in str(refused.value)
