"""What a drafter's `config.json` parses to, in every published layout; what is refused by name."""

import json

import pytest

import dflash_jax as dj
from dflash_jax.config import RopeConfig, layer_ids_by_rule
from published_configs import DRAFTER, LLAMA3_SCALING, drafter, with_dflash, without

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
        {**with_dflash(draft_vocab_size=32000), "block_size": 8},
        with_dflash(draft_vocab_size=32000, has_embed_tokens=True, has_lm_head=True),
    ],
    ids=["plain", "changed", "anchored", "narrow", "llama3", "yarn", "window", "both ways",
         "few ids", "own tables"],
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


@pytest.mark.parametrize("size", [-1, 151937, 32000.0, True])
def test_a_draft_vocabulary_that_no_target_has_is_refused_with_both_numbers(size):
    with pytest.raises(dj.ConfigError, match=rf"draft_vocab_size={size}: .*from 1 to .* 151936"):
        drafter(with_dflash(draft_vocab_size=size))


def test_a_draft_vocabulary_of_its_own_is_read_and_the_whole_one_is_none():
    assert drafter(with_dflash(draft_vocab_size=32000)).draft_vocab_size == 32000
    assert drafter(with_dflash(draft_vocab_size=151936)).draft_vocab_size is None


@pytest.mark.parametrize(
    "key, value",
    [("conv_kernel_size", 0), ("use_swa", False), ("draft_vocab_size", 151936),
     ("final_logit_softcapping", None), ("output_multiplier", 1.0)],
)  # fmt: skip
def test_values_that_leave_the_arithmetic_alone_are_accepted(key, value):
    assert drafter({**DRAFTER, key: value}) == drafter()
