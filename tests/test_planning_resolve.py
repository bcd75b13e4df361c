"""Options left open are decided as designed; what cannot be is refused with the whole list."""

import dataclasses
import logging

import pytest

import dflash_jax as dj
from dflash_jax.planning.resolve import on_platform, resolve
from tiny import DRAFTER, TARGET

PAIR_TARGET = dj.TargetConfig.from_dict(TARGET)
PAIR_DRAFTER = dj.DrafterConfig.from_dict(DRAFTER)
WIDE = dataclasses.replace(PAIR_DRAFTER, block_size=1024)
LONG = dataclasses.replace(PAIR_TARGET, max_position_embeddings=40960)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_defaults_are_the_designed_ones(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    config = resolve(dj.ServeConfig(), LONG, PAIR_DRAFTER)
    assert config.max_seq_len == 4096
    assert config.max_num_tokens == 8192
    assert config.max_batch_size == 16
    assert (config.max_draft_len, config.verify_width, config.block_width) == (3, 4, 4)
    assert config.speculation == "dflash"
    assert config.drafter == PAIR_DRAFTER and config.target == LONG
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


def test_a_draft_length_without_a_drafter_is_refused():
    with pytest.raises(dj.ConfigError, match="max_draft_len=3 without a drafter"):
        resolve(dj.ServeConfig(max_draft_len=3), PAIR_TARGET, None)


def test_speculation_without_a_drafter_is_refused():
    with pytest.raises(dj.ConfigError, match="speculation='dflash' needs a drafter"):
        resolve(dj.ServeConfig(speculation="dflash"), PAIR_TARGET, None)


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


def test_all_findings_are_raised_at_once():
    drafter = dataclasses.replace(PAIR_DRAFTER, hidden_size=48, num_target_layers=36)
    serve = dj.ServeConfig(max_seq_len=600, max_batch_size=100, max_num_tokens=64, max_draft_len=9)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, drafter)
    findings = str(refused.value).splitlines()
    expected = (
        "max_draft_len=9",
        "36 layers",
        "hidden_size is 48",
        "max_seq_len=600",
        "max_batch_size=100",
    )
    assert len(findings) == len(expected)
    assert all(any(part in line for line in findings) for part in expected)


def test_options_that_are_not_built_are_refused_together():
    serve = dj.ServeConfig(kv_layout="paged", context_store="pool", max_seq_len=0)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    message = str(refused.value)
    assert "kv_layout='paged'" in message and "'contiguous'" in message
    assert "context_store='pool'" in message and "max_seq_len=0" in message


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
