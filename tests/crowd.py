"""64 requests of every kind for crowds, what each gives alone, and the comparison of the two."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.row import Row

SERVED, ROWS = 96, 5
WIDE: dict[str, Any] = {"max_seq_len": SERVED, "max_batch_size": ROWS}
PAIR = tiny.GOLDEN / tiny.PAIRS[0]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked, and when it comes and goes (in steps)."""

    prompt: list[int]
    params: dj.SamplingParams
    arrives: int
    leaves: int | None


def requests(vocab_size: int) -> list[Request]:
    """64 of them, half of which share beginnings."""
    rng = np.random.default_rng(4)
    stems = [rng.integers(0, vocab_size, 40).tolist() for _ in range(3)]
    made = []
    for index in range(64):
        own = rng.integers(0, vocab_size, int(rng.integers(1, 30))).tolist()
        stem = stems[index % 3][: int(rng.integers(10, 41))] if index % 4 else []
        prompt = [*stem, *own][: SERVED - 30]
        made.append(
            Request(
                prompt,
                _params(rng, index, vocab_size),
                arrives=int(rng.integers(0, 60)),
                leaves=int(rng.integers(1, 90)) if index % 8 == 5 else None,
            )
        )
    return made


def _params(rng: np.random.Generator, index: int, vocab_size: int) -> dj.SamplingParams:
    count = int(rng.integers(1, 30))
    chosen: dict[str, Any] = {"max_tokens": count}
    if index % 4 == 1:
        chosen |= {"temperature": float(rng.uniform(0.3, 1.5)), "seed": index}
        chosen |= [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "top_k": 40}][index // 4 % 4]
    if index % 4 == 2:
        chosen |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.3}
    if index % 5 == 3:
        chosen |= {"stop_token_ids": rng.integers(0, vocab_size, 9).tolist(), "min_tokens": 1}
    if index % 6 == 2:
        chosen["logit_bias"] = {int(rng.integers(0, vocab_size)): 3.0}
    if index % 7 == 4:
        chosen["logprobs"] = 2
    if index % 9 == 7:
        chosen["speculate"] = False
    return dj.SamplingParams(**chosen)


def golden_requests() -> list[Request]:
    """64 of them over the golden pair's vocabulary."""
    return requests(dj.TargetConfig.from_folder(PAIR / "target").vocab_size)


def alone_plainly(asked: list[Request]) -> list[Row]:
    """Each by plain decoding, one after the other, with nothing taken over."""
    return _one_by_one(asked, None, None)


def known_drafts(asked: list[Request], alone: list[Row]) -> tiny.Draft:
    """Right up to a place in the block which depends on the position alone."""
    texts = [[*one.prompt, *row.generated] for one, row in zip(asked, alone, strict=True)]
    return tiny.known_among(texts, period=5)


def traces_alone(asked: list[Request], drafts: tiny.Draft) -> list[list[int]]:
    """What each round accepts of a request that is alone in a contiguous arena."""
    rows = _one_by_one(asked, PAIR / "drafter", drafts)
    return [row.stats.accepted_drafts_per_round for row in rows]


def _one_by_one(asked: list[Request], drafter: Path | None, drafts: tiny.Draft | None) -> list[Row]:
    engine = tiny_engine.engine(
        PAIR / "target", drafter, drafts, max_seq_len=SERVED, max_batch_size=1
    )
    batch = Batch(engine, reuse=False)
    return [tiny_engine.serve(batch, [made(one)])[0] for one in asked]


def made(request: Request) -> Row:
    return tiny_engine.request(request.prompt, request.params)


def run(batch: Batch, asked: list[Request]) -> list[Row]:
    """Everybody at its time; those who leave are cancelled in the middle."""
    rows = [made(request) for request in asked]
    step = 0
    while step < 100 or any(row.finish_reason is None for row in rows):
        for request, row in zip(asked, rows, strict=True):
            if request.arrives == step:
                batch.submit(row)
            if request.leaves is not None and request.arrives + request.leaves == step:
                batch.cancel(row)
                batch.cancel(row)
        batch.step()
        step += 1
        assert step < 3000
    return rows


def check(rows: list[Row], alone: list[Row], traces: list[list[int]] | None) -> None:
    for index, (row, other) in enumerate(zip(rows, alone, strict=True)):
        cut = len(row.token_ids)
        if row.finish_reason == "abort":
            assert row.token_ids == other.token_ids[:cut], index
        else:
            assert (row.token_ids, row.finish_reason) == (other.token_ids, other.finish_reason)
        if other.output.logprobs is not None:
            assert row.output.logprobs is not None and len(row.output.logprobs) == cut
            for mine, theirs in zip(row.output.logprobs, other.output.logprobs, strict=False):
                assert mine.token_id == theirs.token_id
                assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
                values = [mine.logprob, *(v for _, v in mine.top)]
                expected = [theirs.logprob, *(v for _, v in theirs.top)]
                assert values == pytest.approx(expected, abs=1e-4)
        stats = row.stats
        if row.finish_reason != "abort":
            assert 1 + sum(stats.acceptance_lengths) == len(row.token_ids)
        if traces is not None:
            accepted = stats.accepted_drafts_per_round
            assert accepted == traces[index][: len(accepted)], index
            assert row.finish_reason == "abort" or len(accepted) == len(traces[index])
