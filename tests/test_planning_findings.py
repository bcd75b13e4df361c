"""What `resolve` refuses: all findings at once, those of options alone before there are files."""

import dataclasses

import pytest

import dflash_jax as dj
from dflash_jax.planning.resolve import before_files, refuse_before_files, resolve
from planning_pairs import TINY as PAIR_TARGET
from planning_pairs import TINY_DRAFTER as PAIR_DRAFTER
from planning_pairs import unchecked, warnings


def test_a_draft_length_without_a_drafter_is_refused():
    with pytest.raises(dj.ConfigError, match="max_draft_len=3 without a drafter"):
        resolve(dj.ServeConfig(max_draft_len=3), PAIR_TARGET, None)


def test_speculation_without_a_drafter_is_refused():
    with pytest.raises(dj.ConfigError, match="speculation='dflash' needs a drafter"):
        resolve(dj.ServeConfig(speculation="dflash"), PAIR_TARGET, None)


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
    serve = dj.ServeConfig(
        attention="cudnn", draft_attention="pallas", allow_unqualified=True, max_seq_len=0
    )
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    findings = str(refused.value).splitlines()
    assert len(findings) == 3
    assert "max_seq_len=0" in findings[0]
    assert "attention='cudnn' is not available" in findings[1] and "'xla'" in findings[1]
    assert "draft_attention='pallas' is not available" in findings[2]


def test_what_is_not_built_can_still_be_planned():
    serve = dj.ServeConfig(draft_attention="pallas")
    config = resolve(serve, PAIR_TARGET, PAIR_DRAFTER, engine=False)
    assert config.draft_attention == "pallas"
    with pytest.raises(dj.ConfigError, match="draft_attention='pallas' is not available"):
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER)


def test_a_context_in_a_pool_is_served():
    serve = dj.ServeConfig(kv_layout="paged", context_store="pool", kv_max_tokens=4096)
    config = resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    assert (config.kv_layout, config.context_store, config.page_size) == ("paged", "pool", 32)


@pytest.mark.parametrize("engine", [True, False])
def test_options_of_a_pool_are_refused_with_a_contiguous_layout(engine):
    serve = dj.ServeConfig(context_store="pool", kv_memory_fraction=0.5)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER, engine=engine)
    findings = str(refused.value).splitlines()
    assert len(findings) == 2
    assert all("needs kv_layout='paged'" in finding for finding in findings)


@pytest.mark.parametrize(
    "scaling, says",
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope'"),
        ({"rope_type": "yarn"}, "'factor'"),
        ({"rope_type": "yarn", "factor": "4"}, "must be numbers"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": "large"}, "must be numbers"),
        ("yarn", "a mapping"),
        (4.0, "a mapping"),
        ([("rope_type", "yarn")], "a mapping"),
    ],
)
def test_a_wrong_rope_scaling_is_found_together_with_everything_else(scaling, says):
    drafter = dataclasses.replace(PAIR_DRAFTER, num_target_layers=36)
    serve = unchecked(rope_scaling=scaling, draft_attention="pallas", max_draft_len=9)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, drafter)
    findings = str(refused.value).splitlines()
    assert len(findings) == 4
    for part in ("rope", "draft_attention=", "max_draft_len=9", "36 layers"):
        assert any(part in finding for finding in findings)
    assert any(says in finding for finding in findings if "rope" in finding)


def test_malformed_values_are_found_with_the_rest_of_the_options():
    serve = unchecked(max_seq_len=0, headroom="much", rope_scaling="yarn", kv_max_tokens=64)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER)
    assert len(str(refused.value).splitlines()) == 4


def test_a_missing_drafter_is_found_together_with_everything_else():
    serve = dj.ServeConfig(speculation="dflash", max_seq_len=513)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(serve, PAIR_TARGET, None)
    first, second = str(refused.value).splitlines()
    assert "needs a drafter" in first and "max_seq_len=513" in second


def test_a_memory_that_is_known_refuses_with_an_error_of_its_own():
    seen = []

    def fit(config: dj.ResolvedConfig) -> str:
        seen.append(config.max_batch_size)
        return "too much memory"

    with pytest.raises(dj.MemoryPlanError, match="^too much memory$"):
        resolve(dj.ServeConfig(max_batch_size=5), PAIR_TARGET, PAIR_DRAFTER, fit=fit)
    with pytest.raises(dj.ConfigError) as refused:
        resolve(dj.ServeConfig(max_draft_len=9), PAIR_TARGET, PAIR_DRAFTER, fit=fit)
    assert "max_draft_len=9" in str(refused.value).splitlines()[0]
    assert str(refused.value).splitlines()[1] == "too much memory"
    assert seen == [5, 16]


def test_a_memory_that_suffices_changes_nothing():
    serve = dj.ServeConfig(max_batch_size=5)
    asked = resolve(serve, PAIR_TARGET, PAIR_DRAFTER, fit=lambda config: None)
    assert asked == resolve(serve, PAIR_TARGET, PAIR_DRAFTER)


@pytest.mark.parametrize(
    "options, parts",
    [
        ({}, []),
        ({"max_seq_len": 0, "dtype": "int8"}, ["dtype='int8'", "max_seq_len=0"]),
        ({"kv_layout": "paged"}, []),
        ({"draft_attention": "pallas"}, ["draft_attention='pallas'"]),
        ({"kv_max_tokens": 64}, ["kv_max_tokens=64 needs kv_layout='paged'"]),
        ({"max_batch_size": 2000, "max_draft_len": 7}, ["max_num_tokens >= 16000"]),
        ({"max_batch_size": 1024, "max_draft_len": 7}, []),
        ({"max_batch_size": 2000}, []),
        ({"max_draft_len": 7}, []),
        ({"max_batch_size": 0, "max_draft_len": 7}, ["max_batch_size=0"]),
    ],
)
def test_what_options_alone_say_is_said_before_there_are_files(options, parts):
    serve = unchecked(**options)
    findings = before_files(serve)
    assert len(findings) == len(parts)
    assert all(part in finding for part, finding in zip(parts, findings, strict=True))
    if not parts:
        refuse_before_files(serve)
        return
    with pytest.raises(dj.ConfigError) as refused:
        refuse_before_files(serve)
    assert str(refused.value) == "\n".join(findings)


def test_a_plan_may_name_what_is_not_built_before_there_are_files():
    serve = dj.ServeConfig(attention="pallas", draft_attention="pallas")
    assert before_files(serve, engine=False) == []
    assert len(before_files(serve)) == 2


def test_an_unqualified_kernel_is_refused_unless_it_is_admitted(caplog):
    serve = dj.ServeConfig(attention="pallas")
    with pytest.raises(dj.ConfigError, match="not qualified .*attention='xla'"):
        resolve(serve, PAIR_TARGET, PAIR_DRAFTER, engine=False)
    admitted = dataclasses.replace(serve, allow_unqualified=True)
    assert resolve(admitted, PAIR_TARGET, PAIR_DRAFTER, engine=False).attention == "pallas"
    (warning,) = warnings(caplog)
    assert "allow_unqualified=True" in warning
