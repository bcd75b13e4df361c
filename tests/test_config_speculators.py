"""The speculators layout of a drafter's config: what is read, and that every key is written."""

import json
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.config import Verifier, to_speculators
from published_configs import DRAFTER, drafter, with_dflash, without

# As vLLM's tools write it for an 8B target with 32,000 draft ids: the taps are those of the z-lab
# release plus one, and every release carries the settings of a Domino head.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 15,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "transformer_layer_config": {
        key: value
        for key, value in DRAFTER.items()
        if key not in ("architectures", "block_size", "num_target_layers", "dflash_config")
    },
    "draft_vocab_size": 32000,
    "block_size": 16,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 151669,
    "target_hidden_size": None,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "projector_type": "dflash",
    "gru_hidden_dim": 1024,
    "emb_dim": 256,
    "pure_draft_prefix_len": 1,
    "shift_label": False,
    "dtype": "bfloat16",
}
OWN = {"has_embed_tokens": True, "has_lm_head": True}
SLIDING = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}


def layer(**changes: Any) -> dict[str, Any]:
    nested = {**PUBLISHED["transformer_layer_config"], **changes}
    return {**PUBLISHED, "transformer_layer_config": nested}


def test_a_published_config_is_the_z_lab_one_with_a_vocabulary_of_its_own():
    """Fault 86: an id counts the embedding's output as 0, so the taps are one lower."""
    config = drafter(PUBLISHED)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    expected = with_dflash(draft_vocab_size=32000, **OWN)
    assert config == drafter(without(expected, "num_target_layers"))
    assert (config.trained_draft_len, config.draft_vocab_size) == (15, 32000)


def test_a_whole_draft_vocabulary_is_none():
    assert drafter({**PUBLISHED, "draft_vocab_size": 151936}).draft_vocab_size is None


def test_sliding_layers_are_causal_in_the_block_unless_the_config_says_otherwise():
    raw = layer(**SLIDING, use_sliding_window=True)
    assert drafter(raw).causal == (True,) * 5 and drafter(raw).windows == (2048,) * 5
    assert drafter({**raw, "sliding_window_non_causal": True}).causal == (False,) * 5


def test_windows_that_stand_beside_the_layer_config_count():
    beside = {**layer(sliding_window=None, use_sliding_window=None), **SLIDING}
    beside["transformer_layer_config"].pop("use_sliding_window")
    assert drafter(beside).windows == (2048,) * 5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"aux_hidden_state_layer_ids": [0, 5]}, "0 is the embedding's output"),
        ({"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids'"),
        ({"draft_vocab_size": None}, "'draft_vocab_size'"),
        ({"mask_token_id": None}, "'mask_token_id'"),
        ({"transformer_layer_config": None}, "'transformer_layer_config'"),
        ({"speculators_model_type": "eagle3"}, "eagle3 is not supported"),
        ({"projector_type": "domino"}, "projector_type='domino' is not supported"),
        ({"conv_kernel_size": 2}, "DFlash 2"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes, message):
    with pytest.raises(dj.ConfigError, match=message):
        drafter({**PUBLISHED, **changes})


@pytest.mark.parametrize(
    "raw",
    [
        with_dflash(draft_vocab_size=32000, **OWN),
        with_dflash(**OWN, sample_from_anchor=True),
        {**with_dflash(**OWN), "target_hidden_size": 5120},
        {**with_dflash(**OWN), **SLIDING, "use_sliding_window": True},
        {**with_dflash(**OWN, is_causal=False), **SLIDING, "use_sliding_window": True},
    ],
    ids=["few ids", "anchored", "wider target", "window", "both ways"],
)
def test_a_config_comes_back_from_the_speculators_layout(raw):
    config = drafter(raw)
    written = to_speculators(config, Verifier("owner/model", ("LlamaForCausalLM",)))
    assert drafter(json.loads(json.dumps(written))) == config


def test_every_published_key_is_written_with_the_published_value():
    """All but a Domino head's, which this project has not."""
    written = to_speculators(drafter(PUBLISHED), Verifier("Qwen/Qwen3-8B", ("Qwen3ForCausalLM",)))
    domino = ("projector_type", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
    layer_config = PUBLISHED["transformer_layer_config"]
    flat = without(PUBLISHED, "transformer_layer_config", *domino)
    assert {key: written[key] for key in flat} == flat
    nested = written["transformer_layer_config"]
    same = without(layer_config, "rope_scaling")
    assert {key: nested[key] for key in same} == same
    assert nested["rope_parameters"] == {"rope_theta": 1000000.0, "rope_type": "default"}


def test_a_drafter_that_predicts_from_its_anchor_proposes_a_whole_block():
    written = to_speculators(drafter(with_dflash(sample_from_anchor=True)), Verifier())
    proposal = written["speculators_config"]["proposal_methods"][0]
    assert (proposal["speculative_tokens"], written["sample_from_anchor"]) == (16, True)


def test_a_mask_that_the_layout_has_no_key_for_is_refused():
    with pytest.raises(dj.ConfigError, match="is_causal=True .* use the z-lab layout"):
        to_speculators(drafter(with_dflash(is_causal=True)), Verifier())


def test_the_z_lab_config_has_every_published_key():
    """The keys of `dflash-family.md` A.1, written out here."""
    written = drafter(DRAFTER).to_dict()
    keys = """architectures model_type auto_map block_size num_target_layers dflash_config
        hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
        head_dim rms_norm_eps rope_theta rope_scaling max_position_embeddings vocab_size
        attention_bias hidden_act layer_types use_sliding_window sliding_window max_window_layers
        tie_word_embeddings dtype""".split()
    assert set(keys) <= written.keys()
    assert written["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert {key: written[key] for key in DRAFTER} == DRAFTER
