"""DESIGN §5.4: a request that outgrows the drafter's positions goes on without drafting.

A table of 64 positions served at 256. The text is the target's (NumPy oracle), every such request
warns once, its context stands still (`Watched`), and the rows beside it draft on.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny
import tiny_engine
from dflash_jax.serving.batch import Batch, Row
from numpy_pair import NumpyTarget
from test_serving_adaptive import Forced
from tiny_engine import HostDrafter, Watched, among

TABLE, SERVED, K = 64, 256, 3
PROMPTS = (10, 60, 64, 65, 200)
NEW = 56


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 97, length).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target(tmp_path_factory.mktemp("target") / "target", num_hidden_layers=2)


@pytest.fixture(scope="module")
def answers(target: Path) -> dict[int, list[int]]:
    oracle = NumpyTarget(target)
    return {n: oracle.greedy(prompt(n), NEW) for n in (*PROMPTS, 5)}


def write_drafter(folder: Path, positions: int, **changes) -> Path:
    taps = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 1]}
    config = {"num_target_layers": 2, "dflash_config": taps, **changes}
    return tiny.write_drafter(folder, max_position_embeddings=positions, **config)


@pytest.fixture(scope="module")
def batch(target, answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batch]:
    """Two slots, proposals mostly right so that rows reach the end of the table in big steps."""
    host = HostDrafter()
    texts = [prompt(n) + answer for n, answer in answers.items()]
    host.rule = among(texts, wrong=lambda length: length % 5)
    engine = tiny_engine.engine(
        target,
        write_drafter(tmp_path_factory.mktemp("drafter") / "drafter", TABLE),
        host,
        row_sizes=(2,),
        max_seq_len=SERVED,
        max_batch_size=2,
    )
    yield Batch(Watched(engine), reuse=False)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def expected_drafts(row: Row) -> list[int]:
    """A round drafts while its block of K + 1 ends within the table, and never again."""
    length, drafts = len(row.prompt), []
    for accepted in row.stats.accepted_drafts_per_round:
        alive = length + K + 1 <= TABLE and (not drafts or drafts[-1] > 0)
        drafts.append(K if alive else 0)
        length += accepted + 1
    return drafts


def check(row: Row, answer: list[int]) -> None:
    assert row.token_ids == answer
    assert row.finish_reason == "length"
    assert row.stats.drafts_per_round == expected_drafts(row)
    skipped = [
        stats
        for stats in zip(
            row.stats.drafts_per_round,
            row.stats.accepted_drafts_per_round,
            row.stats.acceptance_lengths,
            strict=True,
        )
        if stats[0] == 0
    ]
    assert skipped and set(skipped) == {(0, 0, 1)}


@pytest.mark.parametrize("length", PROMPTS)
def test_alone_the_text_is_the_targets_and_one_warning_is_given(batch, answers, caplog, length):
    row = tiny_engine.run(batch, (prompt(length), NEW))[0]
    check(row, answers[length])
    assert len(warnings(caplog)) == 1
    assert (
        f"{length} prompt tokens" in warnings(caplog)[0] and f"{TABLE} pos" in warnings(caplog)[0]
    )


@pytest.mark.parametrize("length", PROMPTS)
def test_beside_it_a_short_row_drafts_in_every_round(batch, answers, caplog, length):
    other, row = tiny_engine.run(batch, (prompt(5), 40), (prompt(length), NEW))
    check(row, answers[length])
    assert other.token_ids == answers[5][:40]
    assert set(other.stats.drafts_per_round) == {K}
    assert other.stats.num_accepted_drafts > 0
    assert len(warnings(caplog)) == 1


def test_the_context_stands_still_from_the_first_skipped_round_on(batch, answers):
    watched = batch.engine
    watched.reports.clear()
    lengths: list[int] = []
    watched.after = lambda state: lengths.append(int(state.context.lengths[0]))
    tiny_engine.run(batch, (prompt(60), NEW))
    watched.after = lambda state: None
    drafted = [int(report.num_drafts[0]) for report in watched.reports]
    assert drafted[0] == K and drafted[-1] == 0
    frozen = lengths[2:][drafted.index(0) - 1 :]
    assert len(set(frozen)) == 1 and TABLE - K <= frozen[0] <= TABLE


def test_a_skipped_round_proposes_nothing_even_where_the_next_id_is_0(tmp_path: Path, caplog):
    """Fault 37: the target says id 0 for ever, and id 0 is what an empty buffer holds."""
    target = tiny.write_script_target(
        tmp_path / "target", {i: 0 for i in range(tiny.VOCAB)}, num_hidden_layers=2
    )
    drafter = write_drafter(tmp_path / "drafter", 16, hidden_size=tiny.ROWS)
    host = HostDrafter()
    host.rule = lambda anchors, lengths, own: np.zeros_like(own)
    batch = Batch(tiny_engine.engine(target, drafter, host, max_seq_len=32, max_batch_size=1))
    row = tiny_engine.run(batch, (prompt(6), 24))[0]
    assert row.token_ids == [0] * 24
    # 6 + 4 and 10 + 4 fit into 16, 14 + 4 does not.
    assert row.stats.drafts_per_round == [3, 3] + [0] * 15
    assert row.stats.acceptance_lengths == [4, 4] + [1] * 15
    assert row.stats.num_drafts == row.stats.num_accepted_drafts == 6
    start, end = warnings(caplog)
    # The last round that drafts starts with 6 + 5 tokens, the first that does not with 15.
    assert "drafts up to token 13" in start and "goes on without drafting" in end


def test_a_drafter_with_positions_to_spare_drafts_to_the_served_end(target, tmp_path, caplog):
    drafter = write_drafter(tmp_path / "drafter", 100_000)
    engine = tiny_engine.engine(target, drafter, max_seq_len=48, max_batch_size=1)
    assert engine.state.context is not None
    assert engine.state.context.layers[0].keys.shape[2] == 48 + K + 1
    row = tiny_engine.run(Batch(Watched(engine)), (prompt(7), 41))[0]
    assert row.token_ids == NumpyTarget(target).greedy(prompt(7), 41)
    assert set(row.stats.drafts_per_round) == {K}
    assert warnings(caplog) == []


def test_narrow_and_plain_rounds_end_drafting_where_wide_ones_do(target, answers, tmp_path: Path):
    """The block is one for all widths: a narrow round gets no further than a wide one would."""
    host = HostDrafter()
    host.rule = among([prompt(10) + answers[10]], wrong=lambda length: length % 5)
    drafter = write_drafter(tmp_path / "drafter", TABLE)
    engine = tiny_engine.engine(
        target, drafter, host, adaptive=True, max_seq_len=80, max_batch_size=1, max_num_tokens=16
    )
    batch = Batch(Watched(engine), reuse=False)
    choice = batch._rounds.adaptive = Forced(engine.config)
    row = tiny_engine.run(batch, (prompt(10), NEW))[0]
    assert row.token_ids == answers[10]
    length, expected = 10, []
    for width, accepted in zip(choice.taken, row.stats.accepted_drafts_per_round, strict=True):
        expected.append(width if length + K + 1 <= TABLE else 0)
        length += accepted + 1
    assert row.stats.drafts_per_round == expected and set(expected) == {K, 1, 0}
    assert length > TABLE and expected[-1] == 0
    assert row.stats.stopped_drafting_at is not None
