"""Each rule alone: which numbers pass, which are found, and what the finding says."""

import dataclasses
import re

import pytest

import dflash_jax as dj
from dflash_jax.planning import rules
from planning_pairs import TINY as PAIR_TARGET
from planning_pairs import TINY_DRAFTER as PAIR_DRAFTER
from planning_pairs import unchecked


def changed(**changes) -> dj.DrafterConfig:
    return dataclasses.replace(PAIR_DRAFTER, **changes)


@pytest.mark.parametrize(
    "batch, draft_len, tokens",
    [(8, 15, 128), (1, 0, 1), (2048, 3, 8192), (512, 15, 8192)],
)
def test_a_token_budget_that_is_just_met_passes(batch, draft_len, tokens):
    assert rules.token_budget(batch, draft_len, tokens) is None
    assert rules.token_budget(batch, draft_len, tokens - 1) is not None


def test_a_token_budget_that_is_missed_names_both_remedies():
    """2048 rows of 1 + 4 tokens need 10240; 8192 hold 1638 of them."""
    finding = rules.token_budget(2048, 4, 8192) or ""
    assert "2048" in finding and "1 + 4" in finding and "8192" in finding
    assert "max_num_tokens >= 10240" in finding
    assert "max_batch_size <= 1638" in finding


def test_a_token_budget_below_one_row_names_the_draft_length():
    finding = rules.token_budget(1, 15, 8) or ""
    assert "max_num_tokens >= 16" in finding and "smaller max_draft_len" in finding
    assert "<= 0" not in finding


@pytest.mark.parametrize("anchored, trained", [(False, 3), (True, 4)])
def test_a_draft_length_above_the_trained_one_names_the_largest(anchored, trained):
    """Fault 92: asking for more than a block gives."""
    drafter = changed(predicts_from_anchor=anchored)
    assert rules.draft_len_above_trained(trained, drafter) is None
    finding = rules.draft_len_above_trained(trained + 1, drafter) or ""
    assert f"max_draft_len={trained + 1}" in finding and f"max_draft_len <= {trained}" in finding


def test_a_served_length_may_reach_the_targets_last_position_and_no_further():
    assert rules.beyond_positions(512, PAIR_TARGET) is None
    finding = rules.beyond_positions(513, PAIR_TARGET) or ""
    assert "max_seq_len=513" in finding and "512 positions" in finding
    assert "rope_scaling" in finding


def test_a_drafter_of_this_target_has_no_findings():
    assert rules.wrong_pair(PAIR_TARGET, PAIR_DRAFTER) == []
    assert rules.wrong_vocabulary(PAIR_TARGET, PAIR_DRAFTER) == []


@pytest.mark.parametrize(
    "changes, numbers",
    [
        ({"num_target_layers": 36}, ("36", "4")),
        ({"num_target_layers": None, "target_layer_ids": (0, 4)}, ("block 4", "0 to 3")),
        ({"target_hidden_size": 64}, ("target_hidden_size is 64", "32")),
        ({"hidden_size": 48}, ("hidden_size is 48", "32")),
    ],
)
def test_a_drafter_of_another_target_is_found_with_both_numbers(changes, numbers):
    (finding,) = rules.wrong_pair(PAIR_TARGET, changed(**changes))
    assert all(number in finding for number in numbers)


def test_vocabularies_that_differ_in_padding_only_are_one():
    """Fault 94: sizes alone do not tell."""
    assert rules.wrong_vocabulary(PAIR_TARGET, changed(vocab_size=128)) == []
    assert rules.wrong_vocabulary(PAIR_TARGET, changed(vocab_size=96 + 1024)) == []


def test_vocabularies_further_apart_than_padding_are_two():
    """Fault 94."""
    (finding,) = rules.wrong_vocabulary(PAIR_TARGET, changed(vocab_size=97 + 1024))
    assert "1121" in finding and "97" in finding


def test_a_mask_id_needs_a_row_in_the_targets_table():
    """Fault 89: ids 97 … 127 exist only where the files say that the table is padded."""
    drafter = changed(vocab_size=128, mask_token_id=100)
    (finding,) = rules.wrong_vocabulary(PAIR_TARGET, drafter)
    assert "mask_token_id 100" in finding and "97" in finding
    assert rules.wrong_vocabulary(PAIR_TARGET, drafter, target_rows=128) == []


@pytest.mark.parametrize(
    "option, value",
    [
        ("attention", "pallas"),
        ("attention", "cudnn"),
        ("draft_attention", "pallas"),
    ],
)
def test_options_without_code_here_are_refused_by_name_with_what_there_is(option, value):
    (finding,) = rules.not_built(dj.ServeConfig(**{option: value}))
    assert f"{option}={value!r}" in finding
    assert repr(getattr(dj.ServeConfig(), option)) in finding


@pytest.mark.parametrize(
    "option, value",
    [
        ("speculation", "suffix"),
        ("device_memory", "60GiB"),
        ("headroom", "seed"),
        ("skip_context_budget_check", True),
        ("kv_layout", "paged"),
        ("adaptive", True),
        ("allow_token_limited", True),
        ("rounds_per_step", 2),
        ("allow_unqualified", True),
        ("dtype", "float16"),
    ],
)
def test_what_this_build_honours_is_not_refused(option, value):
    serve = dj.ServeConfig(**{option: value})
    assert rules.not_built(serve) == rules.bad_choices(serve) == rules.pool_options(serve) == []


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        ("speculation", "medusa", "'dflash'"),
        ("kv_layout", "ragged", "'paged'"),
        ("context_store", "host", "'pool'"),
        ("attention", "flash", "'pallas'"),
        ("draft_attention", "cudnn", "'pallas'"),
        ("allocation_order", "pool-first", "'pool_first'"),
        ("headroom", "none", "'seed'"),
        ("dtype", "int8", "'bfloat16'"),
        ("dtype", None, "'auto'"),
    ],
)
def test_a_value_outside_an_options_list_is_refused_with_the_list(option, value, allowed):
    (finding,) = rules.bad_choices(unchecked(**{option: value}))
    assert f"{option}={value!r}" in finding and allowed in finding


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, True, float("nan"), "0.9", None])
def test_a_share_of_the_memory_lies_between_0_and_1(share):
    (finding,) = rules.bad_choices(unchecked(kv_memory_fraction=share))
    assert f"kv_memory_fraction={share!r}" in finding and "between 0 and 1" in finding
    assert rules.bad_choices(dj.ServeConfig(kv_memory_fraction=0.01)) == []


POOL_OPTIONS: list[tuple[str, object]] = [
    ("context_store", "pool"),
    ("allocation_order", "pool_first"),
    ("kv_memory_fraction", 0.5),
    ("kv_max_tokens", 1024),
    ("kv_max_bytes", 2**30),
]


@pytest.mark.parametrize("option, value", POOL_OPTIONS)
def test_an_option_of_the_pool_is_refused_without_one_and_never_ignored(option, value):
    (finding,) = rules.pool_options(dj.ServeConfig(**{option: value}))
    assert f"{option}={value!r} needs kv_layout='paged'" in finding
    assert rules.pool_options(dj.ServeConfig(kv_layout="paged", **{option: value})) == []


def test_all_options_of_the_pool_are_refused_together():
    given: dict = dict(POOL_OPTIONS)
    assert len(rules.pool_options(dj.ServeConfig(**given))) == len(POOL_OPTIONS)
    assert rules.pool_options(dj.ServeConfig()) == []


def test_a_served_length_of_the_drafters_positions_is_silent():
    """No slack: this engine's served length holds no overshoot of a round."""
    assert rules.drafting_ends_early(512, PAIR_DRAFTER, 4) is None
    assert rules.drafting_ends_early(1, PAIR_DRAFTER, 4) is None


def test_a_longer_served_length_names_the_token_at_which_drafting_ends():
    """512 positions, blocks of 4: the last block starts behind 508 rows of context, so at the
    509th token, whose own row does not exist yet."""
    said = rules.drafting_ends_early(513, PAIR_DRAFTER, 4) or ""
    assert "512 positions" in said and "max_seq_len is 513" in said
    assert "up to token 509" in said and "unchanged" in said


def test_a_drafter_may_have_fewer_positions_than_the_target():
    short = changed(max_position_embeddings=64)
    assert rules.drafting_ends_early(64, short, 4) is None
    assert "up to token 61 " in (rules.drafting_ends_early(65, short, 4) or "")


@pytest.mark.parametrize("draft_len, warns", [(1, True), (2, True), (3, False), (4, False)])
def test_only_a_block_narrower_than_trained_is_warned_about(draft_len, warns):
    said = rules.draft_len_below_trained(draft_len, PAIR_DRAFTER)
    assert (said is not None) == warns
    assert said is None or f"max_draft_len={draft_len}" in said and "max_draft_len=3" in said


def test_the_defaults_are_all_built():
    assert rules.not_built(dj.ServeConfig()) == []
    assert rules.bad_numbers(dj.ServeConfig()) == []
    assert rules.bad_choices(dj.ServeConfig()) == []


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8"])
@pytest.mark.parametrize(
    "name",
    [
        "max_seq_len",
        "max_batch_size",
        "max_num_tokens",
        "max_draft_len",
        "page_size",
        "kv_max_tokens",
        "kv_max_bytes",
        "rounds_per_step",
    ],
)
def test_a_size_must_be_a_whole_number(name, value):
    (finding,) = rules.bad_numbers(unchecked(**{name: value}))
    assert re.match(f"{name}={re.escape(repr(value))}: a whole number >= 1", finding)
