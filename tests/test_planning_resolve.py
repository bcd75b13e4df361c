"""Options left open are decided as designed; what cannot be is refused with the whole list."""

import dataclasses
import logging

import pytest

import dflash_jax as dj
from dflash_jax.planning.resolve import on_platform, resolve
from planning_pairs import TINY as PAIR_TARGET
from planning_pairs import TINY_DRAFTER as PAIR_DRAFTER
from planning_pairs import warnings

WIDE = dataclasses.replace(PAIR_DRAFTER, block_size=1024)
LONG = dataclasses.replace(PAIR_TARGET, max_position_embeddings=40960)
LONG_DRAFTER = dataclasses.replace(PAIR_DRAFTER, max_position_embeddings=40960)


def test_the_defaults_are_the_designed_ones(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    config = resolve(dj.ServeConfig(), LONG, LONG_DRAFTER)
    assert config.max_seq_len == 4096
    assert config.max_num_tokens == 8192
    assert config.max_batch_size == 16
    assert (config.max_draft_len, config.verify_width, config.block_width) == (3, 4, 4)
    assert config.speculation == "dflash"
    assert config.drafter == LONG_DRAFTER and config.target == LONG
    assert any("max_seq_len" in r.getMessage() and "4096" in r.getMessage() for r in caplog.records)
    assert warnings(caplog) == []


def test_the_served_length_is_the_positions_where_they_are_fewer(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    assert resolve(dj.ServeConfig(), PAIR_TARGET, None).max_seq_len == 512
    assert any("512" in record.getMessage() for record in caplog.records)


def test_a_served_length_that_is_set_is_not_talked_about(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    assert resolve(dj.ServeConfig(max_seq_len=512), PAIR_TARGET, None).max_seq_len == 512
    assert caplog.records == []


def test_without_a_drafter_nothing_is_drafted():
    config = resolve(dj.ServeConfig(), PAIR_TARGET, None)
    assert (config.speculation, config.drafter) == ("none", None)
    assert (config.max_draft_len, config.verify_width, config.block_width) == (0, 1, 0)


def test_a_drafter_that_is_switched_off_is_not_served():
    config = resolve(dj.ServeConfig(speculation="none"), PAIR_TARGET, PAIR_DRAFTER)
    assert (config.speculation, config.drafter, config.max_draft_len) == ("none", None, 0)


@pytest.mark.parametrize("asked, given", [(None, 7), (3, 3), (31, 31)])
def test_suffix_drafts_without_a_drafter_at_any_width(asked, given):
    """No trained width bounds it: 7 unless it is set."""
    serve = dj.ServeConfig(speculation="suffix", max_draft_len=asked)
    config = resolve(serve, PAIR_TARGET, None)
    assert (config.speculation, config.drafter) == ("suffix", None)
    assert (config.max_draft_len, config.verify_width) == (given, given + 1)
    assert config.block_width == 0


def test_a_drafter_beside_suffix_is_not_served_and_one_line_says_so(caplog):
    caplog.set_level(logging.INFO, "dflash_jax.planning.resolve")
    serve = dj.ServeConfig(speculation="suffix", max_seq_len=64)
    config = resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    assert (config.drafter, config.max_draft_len, config.block_width) == (None, 7, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "suffix" in line and "not loaded" in line


def test_a_drafter_that_predicts_from_its_anchor_needs_one_slot_less():
    """Fault 92: 4 drafts of a block of 4."""
    anchored = dataclasses.replace(PAIR_DRAFTER, predicts_from_anchor=True)
    config = resolve(dj.ServeConfig(), PAIR_TARGET, anchored)
    assert (config.max_draft_len, config.verify_width, config.block_width) == (4, 5, 4)


def test_the_default_batch_is_clamped_with_one_warning(caplog):
    """8192 tokens a step hold 8 rows of 1 + 1023."""
    assert resolve(dj.ServeConfig(), PAIR_TARGET, WIDE).max_batch_size == 8
    (warning,) = warnings(caplog)
    assert "clamping max_batch_size to 8" in warning and "8192" in warning and "1023" in warning


def test_the_default_batch_is_not_above_sixteen(caplog):
    config = resolve(dj.ServeConfig(max_num_tokens=10**6), PAIR_TARGET, PAIR_DRAFTER)
    assert config.max_batch_size == 16 and warnings(caplog) == []


def test_a_token_budget_of_sixteen_rows_gives_sixteen_without_a_warning(caplog):
    config = resolve(dj.ServeConfig(max_num_tokens=64), PAIR_TARGET, PAIR_DRAFTER)
    assert config.max_batch_size == 16 and warnings(caplog) == []


def test_a_batch_that_was_asked_for_is_refused_and_not_clamped():
    with pytest.raises(dj.ConfigError) as refused:
        resolve(dj.ServeConfig(max_batch_size=9), PAIR_TARGET, WIDE)
    assert "max_num_tokens >= 9216" in str(refused.value)
    assert "max_batch_size <= 8" in str(refused.value)


def test_a_batch_that_meets_the_token_budget_exactly_is_served():
    assert resolve(dj.ServeConfig(max_batch_size=8), PAIR_TARGET, WIDE).max_batch_size == 8


def test_a_token_budget_below_one_row_is_refused():
    with pytest.raises(dj.ConfigError, match="max_num_tokens >= 4"):
        resolve(dj.ServeConfig(max_num_tokens=3), PAIR_TARGET, PAIR_DRAFTER)


def test_a_narrower_block_than_trained_is_served_with_one_warning(caplog):
    config = resolve(dj.ServeConfig(max_draft_len=2), PAIR_TARGET, PAIR_DRAFTER)
    assert (config.max_draft_len, config.block_width) == (2, 3)
    (warning,) = warnings(caplog)
    assert "max_draft_len=2" in warning and "max_draft_len=3" in warning


def test_a_wider_block_than_trained_is_refused():
    with pytest.raises(dj.ConfigError, match=r"max_draft_len=4 .*max_draft_len <= 3"):
        resolve(dj.ServeConfig(max_draft_len=4), PAIR_TARGET, PAIR_DRAFTER)


def test_a_served_length_beyond_the_positions_is_refused():
    with pytest.raises(dj.ConfigError, match="max_seq_len=513 .*512 positions.*rope_scaling"):
        resolve(dj.ServeConfig(max_seq_len=513), PAIR_TARGET, None)


def test_a_rope_scaling_override_extends_the_positions():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    serve = dj.ServeConfig(max_seq_len=2048, rope_scaling=scaling)
    target = resolve(serve, PAIR_TARGET, None).target
    assert target.max_position_embeddings == 2048
    assert (target.rope.kind, target.rope.factor) == ("yarn", 4.0)
    assert target.rope.original_max_position_embeddings == 512
    assert target.rope.theta == PAIR_TARGET.rope.theta
    beyond = dataclasses.replace(serve, max_seq_len=2049)
    with pytest.raises(dj.ConfigError, match="max_seq_len=2049 .*2048 positions"):
        resolve(beyond, PAIR_TARGET, None)


def test_an_override_with_an_unknown_rule_lists_what_is_supported():
    serve = dj.ServeConfig(rope_scaling={"rope_type": "longrope", "factor": 2.0})
    with pytest.raises(dj.ConfigError, match="override.*'longrope'.*yarn"):
        resolve(serve, PAIR_TARGET, None)


def test_a_drafter_with_fewer_positions_is_served_with_one_warning(caplog):
    """The last block of 4 within 512 positions starts behind 508 rows: at the 509th token."""
    config = resolve(dj.ServeConfig(max_seq_len=513), LONG, PAIR_DRAFTER)
    assert config.max_seq_len == 513
    (warning,) = warnings(caplog)
    assert "up to token 509" in warning and "max_seq_len is 513" in warning


@pytest.mark.parametrize("served, speculation", [(512, "dflash"), (513, "suffix"), (513, "none")])
def test_a_drafter_that_covers_the_served_length_or_is_unused_is_not_warned_about(
    caplog, served, speculation
):
    resolve(dj.ServeConfig(max_seq_len=served, speculation=speculation), LONG, PAIR_DRAFTER)
    assert warnings(caplog) == []


def test_the_positions_of_a_narrower_block_end_later(caplog):
    """Blocks of 3 in 512 positions: behind 509 rows, at the 510th token."""
    resolve(dj.ServeConfig(max_seq_len=600, max_draft_len=2), LONG, PAIR_DRAFTER)
    (said,) = [warning for warning in warnings(caplog) if "positions" in warning]
    assert "up to token 510" in said


def test_rows_that_take_turns_are_accepted_where_that_is_allowed(caplog):
    """32 rows of 4 tokens in a budget of 64: 16 decode in a step."""
    serve = dj.ServeConfig(max_batch_size=32, max_num_tokens=64, allow_token_limited=True)
    config = resolve(serve, PAIR_TARGET, PAIR_DRAFTER, engine=False)
    assert (config.max_batch_size, config.rows_per_step) == (32, 16)
    assert warnings(caplog) == []
    with pytest.raises(dj.ConfigError, match=r"max_num_tokens >= 128 or max_batch_size <= 16"):
        resolve(dataclasses.replace(serve, allow_token_limited=False), PAIR_TARGET, PAIR_DRAFTER)


def test_not_even_one_row_takes_its_turn_in_a_budget_below_it():
    serve = dj.ServeConfig(max_batch_size=32, max_num_tokens=3, allow_token_limited=True)
    with pytest.raises(dj.ConfigError, match="no batch fits"):
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER, engine=False)


def test_rows_that_fit_a_step_decode_at_once():
    config = resolve(dj.ServeConfig(max_batch_size=16), PAIR_TARGET, PAIR_DRAFTER)
    assert config.rows_per_step == 16


@pytest.mark.parametrize("tokens, batch", [(12, 3), (63, 15), (4, 1)])
def test_a_clamped_batch_that_is_asked_for_is_left_as_it_is(caplog, tokens, batch):
    """The clamp is idempotent, and says so once."""
    serve = dj.ServeConfig(max_num_tokens=tokens)
    first = resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    assert first.max_batch_size == batch and serve.max_batch_size is None
    assert len(warnings(caplog)) == 1
    assert f"clamping max_batch_size to {batch}" in warnings(caplog)[0]
    again = dataclasses.replace(serve, max_batch_size=batch)
    assert resolve(again, PAIR_TARGET, PAIR_DRAFTER) == first
    assert len(warnings(caplog)) == 1


def test_a_batch_that_cannot_be_is_refused_and_not_clamped_to_nothing(caplog):
    with pytest.raises(dj.ConfigError, match="no batch fits"):
        resolve(dj.ServeConfig(max_num_tokens=3), PAIR_TARGET, PAIR_DRAFTER)
    assert warnings(caplog) == []


def test_a_suffix_drafter_needs_no_checkpoint_and_leaves_one_alone():
    config = resolve(dj.ServeConfig(speculation="suffix"), PAIR_TARGET, PAIR_DRAFTER)
    assert (config.drafter, config.max_draft_len, config.block_width) == (None, 7, 0)
    assert config.verify_width == 8


def test_nothing_that_the_user_gave_is_changed():
    serve = dj.ServeConfig(max_seq_len=64)
    resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    assert serve == dj.ServeConfig(max_seq_len=64)


@pytest.mark.parametrize(
    "platform, wanted, dtype",
    [("cpu", "auto", "float32"), ("gpu", "auto", "bfloat16"), ("gpu", "float32", "float32")],
)
def test_the_platform_decides_the_dtype_that_was_left_open(platform, wanted, dtype):
    serve = dj.ServeConfig(dtype=wanted)
    config = on_platform(resolve(serve, PAIR_TARGET, PAIR_DRAFTER), serve, platform)
    assert config.dtype == dtype
    assert (config.read_piece is None) == (platform != "cpu")
