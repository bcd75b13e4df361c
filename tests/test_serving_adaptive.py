"""Which width adaptive drafting takes, against costs worked out by hand; and rounds of all widths.

Which width a real round takes depends on measured times, so the second half forces it: texts are
held to plain decoding, arenas to NumPy, traces to what the scripted drafts get right.
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crowd
import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.config import ResolvedConfig
from dflash_jax.serving.adaptive import LEAST_ROUNDS, PROBE_EVERY, AdaptiveDrafting
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.row import Row
from test_context_exact import Exact
from test_serving_paged import ExactPages
from tiny_engine import Watched

WIDTHS = (7, 3, 0)
PERIOD = 5
Pair = tuple[Path, Path]
# Four rows: three accept two drafts, one accepts all. Shares 1, 1, 1/4, …, 1/4: a row's round
# commits 1 + 2 + 5/4 = 4.25 tokens at width 7, 1 + 2 + 1/4 = 3.25 at 3, and 1 without drafts.
ACCEPTED = {7: [2, 2, 2, 7], 3: [2, 2, 2, 3], 0: [0, 0, 0, 0]}


def played(adaptive: AdaptiveDrafting, costs: dict[int, float], rounds: int) -> list[int]:
    """The widths of so many rounds of four rows."""
    widths = []
    for _ in range(rounds):
        width = adaptive.width(4)
        adaptive.observe(4, width, costs[width], ACCEPTED[width])
        widths.append(width)
    return widths


@pytest.mark.parametrize(
    "costs, best",
    [
        # Per token: 1 / 4.25 = 0.235, 0.9 / 3.25 = 0.277, 0.8 / 1.
        ({7: 1.0, 3: 0.9, 0: 0.8}, 7),
        # 0.235 against 0.70 / 3.25 = 0.215.
        ({7: 1.0, 3: 0.70, 0: 0.5}, 3),
        # 0.235, 0.277 and 0.2.
        ({7: 1.0, 3: 0.9, 0: 0.2}, 0),
    ],
)
def test_the_cheapest_width_per_token_is_taken(
    costs: dict[int, float], best: int, caplog: pytest.LogCaptureFixture
):
    adaptive = AdaptiveDrafting(WIDTHS)
    with caplog.at_level(logging.INFO):
        widths = played(adaptive, costs, 40)
    first = 3 * LEAST_ROUNDS
    assert widths[:first] == [7] * LEAST_ROUNDS + [3] * LEAST_ROUNDS + [0] * LEAST_ROUNDS
    late = widths[first:]
    assert late.count(best) >= len(late) - 40 // PROBE_EVERY
    assert ("at 4 rows" in caplog.text) == (best != 7)


def test_every_width_is_probed_and_a_change_of_cost_is_found():
    adaptive = AdaptiveDrafting(WIDTHS)
    played(adaptive, {7: 1.0, 3: 0.9, 0: 0.2}, 3 * LEAST_ROUNDS)
    widths = played(adaptive, {7: 1.0, 3: 0.9, 0: 0.2}, 4 * PROBE_EVERY)
    assert set(widths) == set(WIDTHS)
    # Plain rounds become dear: drafting is taken up again.
    widths = played(adaptive, {7: 1.0, 3: 0.9, 0: 2.0}, 40)
    assert widths[-4:].count(7) >= 3


def test_loads_are_apart():
    adaptive = AdaptiveDrafting(WIDTHS)
    played(adaptive, {7: 1.0, 3: 0.9, 0: 0.2}, 40)
    assert adaptive.width(1) == 7


def test_the_note_gives_the_cost_of_every_width():
    adaptive, notes = AdaptiveDrafting(WIDTHS), []
    for _ in range(3 * LEAST_ROUNDS):
        width = adaptive.width(4)
        seconds = {7: 0.0425, 3: 0.0065, 0: 0.05}[width]
        notes.append(adaptive.observe(4, width, seconds, ACCEPTED[width]))
    assert [note for note in notes if note] == [
        "3 drafts at 4 rows: a token takes 10.00 ms with 7, 2.00 ms with 3, 50.00 ms with 0"
    ]


class Forced(AdaptiveDrafting):
    """Takes all, half and none of the drafts in turn, each after each, whatever rounds cost."""

    def __init__(self, config: ResolvedConfig):
        self.all, self.half = config.max_draft_len, config.narrow_draft_len
        super().__init__({self.all, self.half, 0})
        pairs = (self.all, self.all, self.half, self.half, 0, 0, self.half, self.all, 0)
        self._next = itertools.cycle(pairs)
        self.taken: list[int] = []
        self.observed: list[tuple[int, int]] = []

    def width(self, rows: int) -> int:
        self.taken.append(next(self._next))
        return self.taken[-1]

    def observe(self, rows: int, width: int, seconds: float, accepted: Sequence[int]) -> str | None:
        self.observed.append((width, sum(accepted)))
        return super().observe(rows, width, seconds, accepted)


def forced(engine: Engine, exact: Exact) -> tuple[Batch, Forced]:
    """A batch whose every call is watched and whose arenas are checked after it."""
    batch = exact.batch = Batch(Watched(engine, exact))
    choice = batch._rounds.adaptive = Forced(engine.config)
    return batch, choice


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two layers and one: what a case costs is the tracing of its programs. K is 7."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "target", seed=6, num_hidden_layers=2)
    taps = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 1]}
    changes: dict[str, Any] = {"block_size": 8, "num_target_layers": 2, "num_hidden_layers": 1}
    return target, tiny.write_drafter(folder / "drafter", dflash_config=taps, **changes)


STEM = np.random.default_rng(8).integers(0, tiny.VOCAB, 30).tolist()
# Texts that go round after some tokens (penalties below zero, a bias) and texts that do not.
OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 28},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 5, "frequency_penalty": -2.0, "seed": 2},
    {"repetition_penalty": 1.3, "max_tokens": 17},
    {"logit_bias": {7: 60.0, 8: 60.0}, "logprobs": 2},
    {"speculate": False},
    {"temperature": 0.7, "top_p": 0.7, "seed": 6, "stop_token_ids": list(range(0, 97, 9))},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "max_tokens": 30},
    {"temperature": 1.3, "min_p": 0.1, "presence_penalty": -2.0, "seed": 8, "max_tokens": 30},
]
SIZES: dict[str, Any] = {"max_seq_len": crowd.SERVED, "max_num_tokens": 32}
ROWS: dict[str, Any] = {"max_batch_size": 4, "row_sizes": (4,)}


@pytest.fixture(scope="module")
def asked() -> list[crowd.Request]:
    """Greedy and sampled, some with a common beginning, one of which leaves early."""
    rng, made = np.random.default_rng(9), []
    for index, options in enumerate(OPTIONS):
        own = rng.integers(0, tiny.VOCAB, int(rng.integers(1, 20))).tolist()
        prompt = [*STEM[: 30 - index], *own] if index % 2 else own
        chosen: dict[str, Any] = {"max_tokens": 22} | options
        params = dj.SamplingParams(**chosen)
        made.append(crowd.Request(prompt, params, arrives=2 * index, leaves=None))
    return [*made, dataclasses.replace(made[1], arrives=4, leaves=9)]


@pytest.fixture(scope="module")
def alone(pair: Pair, asked: list[crowd.Request]) -> list[Row]:
    engine = tiny_engine.engine(pair[0], None, max_batch_size=1, **SIZES)
    batch = Batch(engine, reuse=False)
    return [tiny_engine.serve(batch, [crowd.made(one)])[0] for one in asked]


@pytest.fixture(scope="module")
def texts(asked: list[crowd.Request], alone: list[Row]) -> list[list[int]]:
    return [[*one.prompt, *row.generated] for one, row in zip(asked, alone, strict=True)]


def assert_trace(row: Row, texts: list[list[int]]) -> None:
    """Every round but the last accepts what `tiny.known_among` has right of its first drafts."""
    text, at = [*row.prompt, *row.generated], len(row.prompt)
    rounds = zip(row.stats.drafts_per_round, row.stats.accepted_drafts_per_round, strict=True)
    for drafted, accepted in list(rounds)[:-1]:
        told = next(other for other in texts if len(other) > at and other[at] == text[at])
        right = (7 * at) % PERIOD
        after = enumerate(zip(told[at + 1 :], text[at + 1 :], strict=False))
        parts = [place for place, (mine, theirs) in after if mine != theirs or place == right]
        assert accepted == min([drafted, *parts]), (row.prompt, at)
        at += accepted + 1


POOL: dict[str, Any] = {"kv_layout": "paged", "page_size": 8, "num_pages": 40}
SLOW = "pages and an arena"
CASES: dict[str, dict[str, Any]] = {
    "turns": {"max_num_tokens": 16, "allow_token_limited": True},
    "four rounds a dispatch in a pool": POOL | {"context_store": "pool", "rounds_per_step": 4},
    SLOW: POOL | {"prefix_reuse": False, "rounds_per_step": 2},
}


@pytest.mark.parametrize("case", [*list(CASES)[:-1], pytest.param(SLOW, marks=pytest.mark.slow)])
def test_rounds_of_all_widths_in_any_order_leave_texts_contexts_and_traces_alone(
    case: str, pair: Pair, asked: list[crowd.Request], alone: list[Row], texts: list[list[int]]
):
    drafts = tiny.known_among(texts, period=PERIOD)
    options = SIZES | ROWS | CASES[case]
    target, drafter = pair
    engine = tiny_engine.engine(target, drafter, drafts, adaptive=True, **options)
    exact = (ExactPages if "kv_layout" in options else Exact)(target, drafter)
    batch, choice = forced(engine, exact)
    rows = crowd.run(batch, asked)
    crowd.check(rows, alone, None)
    for row in rows:
        assert_trace(row, texts)
        if not row.params.speculate:
            assert set(row.stats.drafts_per_round) == {0}
    assert len(set(itertools.pairwise(choice.taken))) == 9 and exact.rounds > 50
    drafted = {n for row in rows for n in row.stats.drafts_per_round}
    assert drafted == {choice.all, choice.half, 0}
    assert_observed(choice, batch)


@pytest.mark.parametrize("layout", [{}, POOL], ids=["contiguous", "pages"])
def test_host_drafts_of_all_widths_in_any_order_leave_texts_and_arenas_alone(
    layout: dict[str, Any], pair: Pair, asked: list[crowd.Request], alone: list[Row]
):
    options = SIZES | ROWS | layout
    engine = tiny_engine.engine(pair[0], None, speculation="suffix", adaptive=True, **options)
    exact = (ExactPages if layout else Exact)(pair[0], None)
    batch, choice = forced(engine, exact)
    rows = crowd.run(batch, asked)
    crowd.check(rows, alone, None)
    assert len(set(itertools.pairwise(choice.taken))) == 9 and exact.rounds > 50
    for width in (choice.all, choice.half):
        rounds = [
            (accepted, row.params.temperature > 0)
            for row in rows
            for drafted, accepted in zip(
                row.stats.drafts_per_round, row.stats.accepted_drafts_per_round, strict=True
            )
            if drafted == width
        ]
        assert {(width, True), (width, False)} <= set(rounds)
    assert_observed(choice, batch)


def assert_observed(choice: Forced, batch: Batch) -> None:
    """What is weighed is what was taken and accepted; rounds without any draft are weighed too."""
    assert set(choice.taken) == {width for width, _ in choice.observed}
    assert sum(accepted for _, accepted in choice.observed) == batch.load().accepted > 50
