"""The qualification gate: the reference's table for FlashInfer, with pallas in its role."""

import pytest

from dflash_jax.planning.qualification import (
    DFLASH,
    MODES,
    NO_DRAFTING,
    SUFFIX,
    Combination,
    Mode,
    admit,
    needs_separate_draft_kv,
    standing,
    supported,
    table,
)

NGRAM = Mode("ngram", in_engine=False, draft_kv=True)
MTP = Mode("mtp", in_engine=True, draft_kv=True)
MTP_SHARED = Mode("mtp", in_engine=True, draft_kv=False)
EAGLE = Mode("eagle3", in_engine=True, draft_kv=True)


@pytest.mark.parametrize(
    "attention, mode, admitted",
    [
        ("pallas", NO_DRAFTING, True),
        ("pallas", SUFFIX, True),
        ("pallas", DFLASH, False),
        ("pallas", NGRAM, True),
        ("pallas", MTP, False),
        ("pallas", MTP_SHARED, True),
        ("pallas", EAGLE, False),
        ("cudnn", DFLASH, False),
        ("cudnn", NO_DRAFTING, True),
        ("xla", NO_DRAFTING, True),
        ("xla", SUFFIX, True),
        ("xla", DFLASH, True),
        ("xla", MTP, True),
        ("xla", EAGLE, True),
    ],
)
def test_the_gate_is_that_of_the_reference(attention, mode, admitted):
    assert supported(attention, mode) == admitted


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("attention", ["pallas", "cudnn"])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_dflash_is_refused_with_the_grounds_and_the_remedy(platform, attention, layout):
    """Whatever the drafter's attention and wherever its context lies: neither is in the key."""
    found = admit(Combination(platform, attention, layout, "dflash"), allow_unqualified=False)
    assert found.warning is None
    message = found.finding or ""
    assert "not qualified" in message and f"attention={attention!r}" in message
    assert "whatever the drafter's attention and context store" in message
    assert "long contexts, reuse under pressure and accuracy: not measured" in message
    assert "attention='xla'" in message and "allow_unqualified=True" in message


def test_the_grounds_are_what_is_missing_and_never_a_defect():
    message = admit(Combination("gpu", "pallas", "paged", "dflash"), allow_unqualified=False)
    for invented in ("wrong", "broken", "crash", "corrupt", "bug", "slow", "fail"):
        assert invented not in (message.finding or "")


def test_other_modes_have_a_message_of_their_own_that_names_them():
    combination = Combination("gpu", "pallas", "contiguous", "mtp")
    message = admit(combination, allow_unqualified=False, mode=MTP).finding or ""
    assert "speculation='mtp'" in message
    assert "draft K/V apart from the target's" in message and "not supported" in message
    assert "not qualified" not in message and "attention='xla'" in message


@pytest.mark.parametrize("mode", [DFLASH, MTP])
def test_the_option_admits_with_one_warning_and_the_same_grounds(mode):
    combination = Combination("gpu", "pallas", "contiguous", mode.name)
    refused = admit(combination, allow_unqualified=False, mode=mode).finding or ""
    found = admit(combination, allow_unqualified=True, mode=mode)
    assert found.finding is None
    warning = found.warning or ""
    grounds, _, remedy = warning.partition("; admitted by")
    assert remedy == " allow_unqualified=True"
    assert refused.startswith(grounds)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(
    "combination, mode",
    [
        (Combination("gpu", "xla", "contiguous", "dflash"), None),
        (Combination("gpu", "xla", "paged", "dflash"), None),
        (Combination("cpu", "xla", "contiguous", "dflash"), None),
        (Combination("gpu", "pallas", "contiguous", "none"), None),
        (Combination("gpu", "pallas", "contiguous", "suffix"), None),
        (Combination("gpu", "cudnn", "paged", "none"), None),
        (Combination("gpu", "pallas", "contiguous", "ngram"), NGRAM),
        (Combination("gpu", "pallas", "contiguous", "mtp"), MTP_SHARED),
        (Combination("gpu", "xla", "contiguous", "mtp"), MTP),
    ],
)
def test_what_passes_the_gate_passes_in_silence(combination, mode, allowed):
    assert admit(combination, allow_unqualified=allowed, mode=mode) == (None, None)


@pytest.mark.parametrize(
    "mode, store, expected",
    [
        (DFLASH, "arena", False),
        (DFLASH, "pool", True),
        (NO_DRAFTING, "pool", False),
        (NO_DRAFTING, "arena", False),
        (SUFFIX, "pool", False),
        (NGRAM, "pool", False),
        (MTP_SHARED, "pool", False),
        (MTP, "pool", True),
        (EAGLE, "pool", True),
    ],
)
def test_draft_kv_is_needed_of_the_targets_manager_only_for_a_context_in_the_pool(
    mode, store, expected
):
    assert needs_separate_draft_kv(mode, context_store=store) == expected


def test_dflash_keeps_its_context_to_itself_by_default():
    assert not needs_separate_draft_kv(DFLASH)


def test_the_table_has_every_combination_once():
    keys = [combination for combination, _ in table()]
    assert len(keys) == len(set(keys))
    expected = {
        Combination(platform, attention, layout, speculation)
        for platform, attentions in (
            ("cpu", ("xla", "pallas")),
            ("gpu", ("xla", "pallas", "cudnn")),
        )
        for attention in attentions
        for layout in ("contiguous", "paged")
        for speculation in ("none", "suffix", "dflash")
    }
    assert set(keys) == expected
    assert set(MODES) == {"none", "suffix", "dflash"}


def test_the_table_and_the_gate_say_the_same():
    """A combination is refused exactly where its standing is unqualified."""
    for combination, known in table():
        refused = admit(combination, allow_unqualified=False).finding is not None
        assert refused == (known.name == "unqualified"), combination
        assert known == standing(combination)
        assert known.name in ("qualified", "reference", "unqualified") and known.grounds


def test_qualified_names_its_evidence_and_nothing_unmeasured_is_called_so():
    """No GPU run is recorded yet, and no kernel of its own."""
    for combination, known in table():
        if known.name == "qualified":
            assert (combination.platform, combination.attention) == ("cpu", "xla")
            assert combination.kv_layout == "contiguous"
            assert "tests" in known.grounds and "not measured" not in known.grounds
        else:
            assert "not measured" in known.grounds


def test_xla_is_the_reference_wherever_it_is_not_measured():
    for speculation in MODES:
        assert standing(Combination("gpu", "xla", "paged", speculation)).name == "reference"
        assert standing(Combination("tpu", "xla", "contiguous", speculation)).name == "reference"
