"""64 requests at once are each what it is alone, whatever the engine does with them meanwhile.

Random lengths, options, arrivals and cancels, through chunked prefill, prefix reuse, moves, turns
and several rounds a dispatch. Held to plain decoding of one request at a time: ids, log-
probabilities, ends; and to the drafter's trace alone: texts can be right while drafts are not.
"""

from typing import Any

import pytest

import tiny
import tiny_engine
from crowd import (
    PAIR,
    WIDE,
    Request,
    alone_plainly,
    check,
    golden_requests,
    known_drafts,
    run,
    traces_alone,
)
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.row import Row
from tiny_engine import Watched


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return golden_requests()


@pytest.fixture(scope="module")
def alone(asked: list[Request]) -> list[Row]:
    return alone_plainly(asked)


@pytest.fixture(scope="module")
def drafts(asked: list[Request], alone: list[Row]) -> tiny.Draft:
    return known_drafts(asked, alone)


@pytest.fixture(scope="module")
def traces(asked: list[Request], drafts: tiny.Draft) -> list[list[int]]:
    return traces_alone(asked, drafts)


def assert_all_free(batch: Batch) -> None:
    load = batch.load()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    assert load.free_slots == load.slots and batch.slots == [None] * load.slots


def assert_counted(batch: Batch, rows: list[Row]) -> None:
    """Fault 69: what a round runs beside its rows, idle slots of its bucket, is in no figure."""
    load, stats = batch.load(), [row.stats for row in rows]
    width = batch.engine.config.max_draft_len
    assert load.rounds == sum(one.num_rounds for one in stats)
    assert load.accepted == sum(load.accepted_at) == sum(one.num_accepted_drafts for one in stats)
    drafted = sum(1 for one in stats for count in one.drafts_per_round if count)
    assert load.rounds_drafting == drafted <= load.rounds
    assert load.drafts == drafted * width
    # The reports themselves, empty rows of a bucket included.
    assert load.drafts == sum(int(r.num_drafts.sum()) for r in batch.engine.reports)  # type: ignore[attr-defined]


CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks of 64": {"max_num_tokens": 64},
    "chunks of 16, turns": {"max_num_tokens": 16, "allow_token_limited": True},
    "one row a step": {"max_num_tokens": 8, "allow_token_limited": True},
    "four rounds a dispatch": {"rounds_per_step": 4},
    "no reuse": {"prefix_reuse": False},
}


QUICK = ("as it comes", "chunks of 16, turns")


@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_every_request_of_a_crowd_is_what_it_is_alone(
    case: str, asked: list[Request], alone: list[Row], drafts: tiny.Draft, traces: list[list[int]]
):
    """Faults 7, 20, 44, 55, 56, 57, 60, 66, 69; every write is watched, bit by bit."""
    options = WIDE | CASES[case]
    engine = tiny_engine.engine(PAIR / "target", PAIR / "drafter", drafts, **options)
    batch = Batch(Watched(engine))
    rows = run(batch, asked)
    check(rows, alone, traces)
    assert_all_free(batch)
    load = batch.load()
    assert (load.prefix_hits > 5) == (case != "no reuse")
    assert load.prefill_tokens + load.prefix_tokens >= sum(
        len(row.prompt) for row in rows if row.finish_reason != "abort"
    )
    assert load.accepted > 100
    assert_counted(batch, rows)


def test_a_crowd_decodes_plainly_as_each_alone(asked: list[Request], alone: list[Row]):
    engine = tiny_engine.engine(PAIR / "target", None, **WIDE)
    batch = Batch(Watched(engine))
    check(run(batch, asked), alone, None)
    assert_all_free(batch)


def test_host_drafts_leave_a_crowd_alone(asked: list[Request], alone: list[Row]):
    engine = tiny_engine.engine(PAIR / "target", None, speculation="suffix", **WIDE)
    batch = Batch(Watched(engine))
    check(run(batch, asked), alone, None)
    assert_all_free(batch)


def test_adaptive_drafting_leaves_texts_alone_and_says_what_it_decides(
    asked: list[Request], alone: list[Row], drafts: tiny.Draft
):
    engine = tiny_engine.engine(PAIR / "target", PAIR / "drafter", drafts, adaptive=True, **WIDE)
    batch = Batch(Watched(engine))
    rows = run(batch, asked)
    check(rows, alone, None)
    config = engine.config
    used = {drafted for row in rows for drafted in row.stats.drafts_per_round}
    assert {0, config.narrow_draft_len, config.max_draft_len} <= used
    assert 0 < config.narrow_draft_len < config.max_draft_len
