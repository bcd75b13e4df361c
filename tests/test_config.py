"""What `config.json` files and options parse to, and what is refused by name.

Configs are written here as plain dictionaries in the published layouts; the numbers that a parsed
record must hold are written next to them. Nothing here loads weights or starts a model.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.config import LAYER_TYPES, ROPE_TYPES, TARGET_TYPES, RopeConfig, layer_ids_by_rule

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
QWEN3: dict[str, Any] = {
    **QWEN2,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# Qwen3-8B-DFlash-b16, as published.
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 5,
}
# Target depth and ids of every published drafter that follows the rule.
PUBLISHED_IDS = {
    "Qwen3-4B and 8B": (36, (1, 9, 17, 25, 33)),
    "Qwen3-Coder-30B-A3B": (48, (1, 12, 23, 34, 45)),
    "LLaMA3.1-8B-Instruct": (32, (1, 8, 15, 22, 29)),
    "gpt-oss-20b": (24, (1, 6, 11, 16, 21)),
    "gpt-oss-120b": (36, (1, 9, 17, 25, 33)),
    "Qwen3.5-4B and 9B": (32, (1, 5, 9, 13, 17, 21, 25, 29)),
    "Qwen3.5-27B": (64, (1, 10, 18, 27, 35, 44, 52, 61)),
    "Qwen3.5-27B, first release": (64, (1, 16, 31, 46, 61)),
    "Qwen3.5-35B-A3B": (40, (1, 6, 11, 16, 22, 27, 32, 37)),
    "Qwen3.5-122B-A10B": (48, (1, 7, 14, 20, 26, 32, 39, 45)),
    "Qwen3.6-27B": (64, (1, 16, 31, 46, 61)),
    "Qwen3.6-35B-A3B": (40, (1, 6, 11, 16, 22, 27, 32, 37)),
    "gemma-4-31B-it": (60, (1, 12, 23, 35, 46, 57)),
    "gemma-4-26B-A4B-it": (30, (1, 6, 11, 17, 22, 27)),
    "Kimi-K2.5": (61, (1, 12, 24, 35, 47, 58)),
}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The same dictionary without some keys."""
    return {key: value for key, value in raw.items() if key not in keys}


def target(raw: dict[str, Any], **changes: Any) -> dj.TargetConfig:
    return dj.TargetConfig.from_dict({**raw, **changes})


def drafter(raw: dict[str, Any] = DRAFTER, **changes: Any) -> dj.DrafterConfig:
    return dj.DrafterConfig.from_dict({**raw, **changes})


def with_dflash(**changes: Any) -> dict[str, Any]:
    """The published config with changes under `dflash_config`; None takes a key out."""
    nested = {**DRAFTER["dflash_config"], **changes}
    return {**DRAFTER, "dflash_config": {k: v for k, v in nested.items() if v is not None}}


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


def test_a_published_drafter_is_read():
    config = drafter()
    assert (config.block_size, config.trained_draft_len) == (16, 15)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.mask_token_id, config.num_target_layers) == (151669, 36)
    assert (config.hidden_size, config.target_hidden_size, config.head_dim) == (4096, 4096, 128)
    assert config.windows == (None,) * 5 and config.causal == (False,) * 5
    assert config.rope == RopeConfig(1000000.0)
    assert not config.predicts_from_anchor


def test_flat_and_nested_layouts_give_the_same_settings():
    """Fault 40: four layouts of one drafter."""
    nested = with_dflash(block_size=16)
    nested = without(nested, "block_size", "rope_theta", "rope_scaling")
    nested["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default"}
    flat = {**without(DRAFTER, "dflash_config"), **DRAFTER["dflash_config"]}
    half = {**DRAFTER, "mask_token_id": 151669}
    half["dflash_config"] = {"target_layer_ids": [1, 9, 17, 25, 33]}
    assert drafter(nested) == drafter(flat) == drafter(half) == drafter()


def test_the_nested_value_wins_over_the_top_level():
    """Fault 40: a block of 8 under dflash_config is not the 16 beside it."""
    assert drafter(with_dflash(block_size=8)).block_size == 8


@pytest.mark.parametrize(
    "key", ["block_size", "vocab_size", "hidden_size", "num_hidden_layers", "rope_theta"]
)
def test_a_drafter_key_that_is_in_neither_place_is_named(key):
    """Fault 40."""
    with pytest.raises(dj.ConfigError, match=f"'{key}'"):
        drafter(without(DRAFTER, key))


def test_missing_layer_ids_are_an_error_that_shows_what_an_even_spread_would_be():
    """Fault 85: the ids are named and never guessed."""
    with pytest.raises(dj.ConfigError) as refused:
        drafter(with_dflash(target_layer_ids=None))
    message = str(refused.value)
    assert "'target_layer_ids'" in message and "not guessed" in message
    assert "[1, 9, 17, 25, 33]" in message and "5 layers" in message


def test_missing_layer_ids_without_a_depth_are_still_an_error():
    """Fault 85."""
    raw = with_dflash(target_layer_ids=None)
    with pytest.raises(dj.ConfigError, match="'target_layer_ids'"):
        drafter(without(raw, "num_target_layers"))


@pytest.mark.parametrize("name", PUBLISHED_IDS)
def test_the_even_spread_rule_gives_the_published_ids(name):
    depth, ids = PUBLISHED_IDS[name]
    assert layer_ids_by_rule(depth, len(ids)) == ids
    assert (
        drafter(with_dflash(target_layer_ids=list(ids)), num_target_layers=depth).target_layer_ids
        == ids
    )


def test_one_tapped_block_is_the_middle_one():
    assert layer_ids_by_rule(36, 1) == (18,)


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "distinct block ids"),
        ([1, 1], "distinct block ids"),
        ([-1, 2], "distinct block ids"),
        ([1, 36], "block 36 .*num_target_layers=36: ids run from 0 to 35"),
    ],
)
def test_layer_ids_that_no_target_has_are_refused(ids, message):
    with pytest.raises(dj.ConfigError, match=message):
        drafter(with_dflash(target_layer_ids=ids))


def test_a_missing_mask_id_is_an_error_and_has_no_default():
    """Fault 89."""
    with pytest.raises(dj.ConfigError, match="'mask_token_id'.*no default"):
        drafter(with_dflash(mask_token_id=None))


@pytest.mark.parametrize("mask", [-1, 151936, 500000])
def test_a_mask_id_outside_the_vocabulary_is_an_error(mask):
    """Fault 89."""
    with pytest.raises(dj.ConfigError, match=f"mask_token_id {mask} .*151936 rows.*151935"):
        drafter(with_dflash(mask_token_id=mask))


def test_a_mask_id_of_zero_is_a_mask_id():
    """Fault 89: 0 is an id, not "absent"."""
    assert drafter(with_dflash(mask_token_id=0)).mask_token_id == 0


def test_a_block_of_eight_gives_seven_drafts_or_eight_from_the_anchor():
    """Fault 92."""
    plain = drafter(block_size=8)
    anchored = drafter(with_dflash(sample_from_anchor=True), block_size=8)
    assert (plain.trained_draft_len, anchored.trained_draft_len) == (7, 8)
    assert (plain.block_width(7), anchored.block_width(8)) == (8, 8)


@pytest.mark.parametrize(
    "raw",
    [
        DRAFTER,
        {**DRAFTER, "block_size": 8, "head_dim": 64, "attention_bias": True},
        {**with_dflash(sample_from_anchor=True), "block_size": 8},
        {**DRAFTER, "target_hidden_size": 5120},
        {**DRAFTER, "rope_scaling": {**LLAMA3_SCALING}},
        {**DRAFTER, "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.4,
                                     "original_max_position_embeddings": 4096}},
        {**DRAFTER, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
         "sliding_window": 2048, "use_sliding_window": True},
        {**DRAFTER, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
         "use_sliding_window": True, "is_causal": False},
    ],
    ids=["plain", "changed", "anchored", "narrow", "llama3", "yarn", "window", "both ways"],
)  # fmt: skip
def test_a_drafter_config_comes_back_from_its_own_json(raw):
    """Fault 92: block size and convention among the rest."""
    config = drafter(raw)
    assert drafter(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("conv_kernel_size", 4, "DFlash 2"),
        ("selector_rank", 256, "DFlash 2"),
        ("markov_rank", 256, "DSpark"),
        ("gru_hidden_dim", 1024, "Domino"),
        ("use_swa", True, "use_swa"),
        ("attention_sink_bias", True, "sinks"),
        ("draft_vocab_size", 32000, "d2t"),
        ("final_logit_softcapping", 30.0, "soft-capping"),
        ("output_multiplier", 2.0, "multiplier"),
        ("input_embedding_scale", 64.0, "embedding scale"),
    ],
)
def test_features_without_code_here_are_refused_by_name(key, value, named):
    for raw in ({**DRAFTER, key: value}, with_dflash(**{key: value})):
        with pytest.raises(dj.ConfigError) as refused:
            drafter(raw)
        assert key in str(refused.value) and named in str(refused.value)


@pytest.mark.parametrize(
    "key, value",
    [("conv_kernel_size", 0), ("use_swa", False), ("draft_vocab_size", 151936),
     ("final_logit_softcapping", None), ("output_multiplier", 1.0)],
)  # fmt: skip
def test_values_that_leave_the_arithmetic_alone_are_accepted(key, value):
    assert drafter({**DRAFTER, key: value}) == drafter()


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
