"""What a target's `config.json` parses to, and what both kinds share: rope, windows, files.

The numbers that a parsed record must hold are written next to the config. Nothing here loads
weights or starts a model.
"""

import json
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.config import LAYER_TYPES, ROPE_TYPES, TARGET_TYPES, RopeConfig
from published_configs import DRAFTER, LLAMA, LLAMA3_SCALING, QWEN2, QWEN3, drafter, target, without


def test_a_llama_config_is_read_with_its_rope_scaling():
    config = target(LLAMA)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (2048, 16, 128256)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 64)
    assert config.rope == RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert config.tie_word_embeddings and not config.qk_norm
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias)
    assert config.windows == (None,) * 16
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_a_llama_with_biases_has_them_everywhere_the_config_says():
    config = target(LLAMA, attention_bias=True, mlp_bias=True)
    assert config.qkv_bias and config.o_bias and config.mlp_bias


def test_a_qwen2_config_has_biases_on_queries_keys_and_values_only():
    config = target(QWEN2)
    assert config.qkv_bias and not config.o_bias and not config.mlp_bias and not config.qk_norm
    assert config.head_dim == 64, "896 / 14, where the config gives none"
    assert config.eos_token_ids == (151645,)


def test_a_qwen3_config_has_head_norms_and_the_bias_that_it_says():
    config = target(QWEN3)
    assert config.qk_norm and config.qkv_bias and config.o_bias
    assert not target(QWEN3, attention_bias=False).qkv_bias


def test_head_dim_is_read_where_the_config_gives_it():
    """Fault 90: 128, not 1024 / 16; for the drafter 16, not 4096 / 32."""
    assert target(QWEN3).head_dim == 128
    assert drafter(head_dim=16).head_dim == 16


def test_a_head_dim_that_cannot_be_derived_is_asked_for():
    with pytest.raises(dj.ConfigError, match=r"no head_dim .*hidden_size 100 .*multiple of 16"):
        target(without(QWEN3, "head_dim"), hidden_size=100)


@pytest.mark.parametrize("raw", [LLAMA, QWEN2, QWEN3], ids=lambda raw: raw["model_type"])
def test_the_old_and_the_new_rope_layout_are_the_same(raw):
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    new = without(raw, "rope_theta", "rope_scaling")
    new["rope_parameters"] = {"rope_theta": raw["rope_theta"], **scaling}
    assert target(new) == target(raw)


def test_the_older_key_of_the_rope_type_is_read():
    scaling = {"type": "linear", "factor": 4.0}
    assert target(LLAMA, rope_scaling=scaling).rope == RopeConfig(500000.0, "linear", factor=4.0)


def test_rope_parameters_that_differ_by_layer_type_are_refused():
    full = {"rope_type": "default", "rope_theta": 1e6}
    per_type = {"full_attention": full, "sliding_attention": {**full, "rope_theta": 1e4}}
    with pytest.raises(dj.ConfigError, match="differ by layer type.*full_attention"):
        target(QWEN3, rope_parameters=per_type)
    same = {"full_attention": full, "sliding_attention": dict(full)}
    assert target(QWEN3, rope_parameters=same).rope == RopeConfig(1e6)


def test_a_config_without_theta_names_both_places():
    with pytest.raises(dj.ConfigError, match=r"'rope_theta' neither .* nor in 'rope_parameters'"):
        target(without(QWEN2, "rope_theta"))


def test_a_rotation_of_a_part_of_the_head_is_refused():
    with pytest.raises(dj.ConfigError, match=r"partial_rotary_factor=0\.5: only 1\.0"):
        target(LLAMA, partial_rotary_factor=0.5)


@pytest.mark.parametrize("kind", ["mistral", None, "gemma3"])
def test_an_unknown_model_type_lists_what_is_supported(kind):
    with pytest.raises(dj.ConfigError) as refused:
        target(LLAMA, model_type=kind)
    assert repr(kind) in str(refused.value)
    assert all(name in str(refused.value) for name in TARGET_TYPES)


@pytest.mark.parametrize("parse", [target, drafter])
def test_an_unknown_rope_type_lists_what_is_supported(parse):
    """Fault 41: a rule without code here is an error, not the default one."""
    raw = LLAMA if parse is target else DRAFTER
    with pytest.raises(dj.ConfigError) as refused:
        parse(raw, rope_scaling={"rope_type": "longrope", "factor": 4.0})
    assert "'longrope'" in str(refused.value)
    assert all(name in str(refused.value) for name in ROPE_TYPES)


@pytest.mark.parametrize("missing", sorted(set(LLAMA3_SCALING) - {"rope_type"}))
def test_a_number_that_a_rope_rule_needs_is_named_when_it_is_absent(missing):
    with pytest.raises(dj.ConfigError, match=f"{missing}"):
        target(LLAMA, rope_scaling=without(LLAMA3_SCALING, missing))


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_cannot_be_rolled_back_are_refused_by_number_and_type(kind):
    """Fault 6."""
    types = ["full_attention"] * 24
    types[2] = kind
    with pytest.raises(dj.ConfigError) as refused:
        target(QWEN2, layer_types=types)
    message = str(refused.value)
    assert "layer 2" in message and repr(kind) in message
    assert all(name in message for name in LAYER_TYPES)


def test_layer_types_of_another_depth_are_refused():
    with pytest.raises(dj.ConfigError, match="3 layer_types for 24 layers"):
        target(QWEN2, layer_types=["full_attention"] * 3)


def test_a_window_is_used_only_where_the_config_enables_it():
    """Fault 51, the config's part."""
    assert target(QWEN2).windows == (None,) * 24
    enabled = target(QWEN2, use_sliding_window=True)
    assert enabled.windows == (None,) * 21 + (32768,) * 3
    types = ["sliding_attention"] * 4 + ["full_attention"]
    listed = drafter(layer_types=types, sliding_window=2048, use_sliding_window=True)
    assert listed.windows == (2048,) * 4 + (None,)
    assert listed.causal == (True,) * 4 + (False,)
    off = drafter(layer_types=types, sliding_window=2048, use_sliding_window=False)
    assert off.windows == (None,) * 5 and off.causal == (False,) * 5


def test_a_window_layer_without_a_window_names_the_key():
    types = ["sliding_attention"] * 5
    with pytest.raises(dj.ConfigError, match="'sliding_window'"):
        drafter(layer_types=types, use_sliding_window=True)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "rms_norm_eps", "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_key_of_a_target_is_named(key):
    with pytest.raises(dj.ConfigError, match=f"'{key}'"):
        target(without(QWEN2, key))


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "12"])
def test_a_size_that_is_no_whole_number_is_refused_with_its_value(value):
    with pytest.raises(dj.ConfigError, match=f"num_hidden_layers={value!r}: a whole number >= 1"):
        target(QWEN2, num_hidden_layers=value)


def test_query_heads_that_the_kv_heads_do_not_divide_are_refused():
    with pytest.raises(dj.ConfigError, match="14 query heads, not a multiple of 4"):
        target(QWEN2, num_key_value_heads=4)


def test_another_activation_is_refused():
    with pytest.raises(dj.ConfigError, match=r"hidden_act='gelu'.*only 'silu'"):
        target(LLAMA, hidden_act="gelu")


def test_end_ids_of_the_generation_config_are_united_with_the_models(tmp_path):
    """Fault 28, the config's part."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, "eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    assert dj.TargetConfig.from_folder(tmp_path).eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    "content, message",
    [(None, "no config.json"), ("{", "not JSON"), ("[]", "holds list"), ("\xff", "not JSON")],
)
def test_a_folder_whose_config_cannot_be_read_is_named(tmp_path: Path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    for parse in (dj.TargetConfig.from_folder, dj.DrafterConfig.from_folder):
        with pytest.raises(dj.CheckpointError, match=message) as refused:
            parse(tmp_path)
        assert str(tmp_path) in str(refused.value)
