"""What a plan says: the table, the document and the warnings."""

import json

import pytest

from dflash_jax.planning.device import given_memory
from planning_pairs import GIB, RESERVE, measured, qwen3_plan, tiny_plan


def test_a_plan_is_one_json_document_with_everything_in_it():
    plan = qwen3_plan(given_memory("80GiB"), max_seq_len=49_152, max_batch_size=16)
    read = json.loads(json.dumps(plan.to_dict()))
    assert (read["verdict"], read["fits"]) == ("refused", False)
    assert (read["largest_batch_size"], read["largest_seq_len"]) == (7, 22_584)
    assert (read["largest_unproven_batch_size"], read["largest_unproven_seq_len"]) == (8, 24_981)
    assert sum(row["bytes"] for row in read["rows"].values()) == read["needed"] == plan.needed
    assert read["rows"]["KV arena"]["formula"].startswith("16 rows x 49,168 positions x 36 layers")
    assert read["available"] == 80 * GIB and read["reserve"] == RESERVE
    assert read["device"]["total"] == 80 * GIB
    assert read["allocation_order"]["order"] == "arena_first"
    assert read["refusal"] == plan.refusal() and read["measured"] is None
    assert tiny_plan(10**12).to_dict()["refusal"] is None


@pytest.mark.parametrize("measure", [None, 0, 10**6])
def test_a_measured_plan_is_a_json_document_too(measure):
    plan = tiny_plan(10**12).with_measured(None if measure is None else measured(measure))
    read = json.loads(json.dumps(plan.to_dict()))
    assert (read["measured"] or {}).get("temporaries") == measure


@pytest.mark.parametrize("free", [0, 1, 10**5, 10**6, 6 * GIB, 10**12])
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_the_table_has_every_row_the_verdict_and_the_largest_sizes(free, layout):
    plan = tiny_plan(free, kv_layout=layout)
    text = str(plan)
    assert all(name in text for name in plan.rows)
    assert f"verdict: {plan.verdict}" in text
    assert f"largest batch at 64 tokens: {plan.largest_batch_size:,}" in text
    assert "needed" in text and "reserve" in text and "device" in text
    assert ("levers: " in text) == (plan.verdict != "fits")
    assert max(map(len, text.splitlines())) < 300


def test_warnings_are_part_of_the_table_and_of_the_document():
    plan = tiny_plan(10**12).with_warnings(["one", "two"])
    assert plan.warnings == ("one", "two")
    assert "warning: one" in str(plan) and plan.to_dict()["warnings"] == ["one", "two"]
