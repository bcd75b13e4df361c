"""A prefix hit on the real engine: nothing computed twice, the same drafts, the same rows."""

from pathlib import Path

import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.row import Row
from numpy_pair import NumpyContext, NumpyTarget
from test_context_exact import Exact, assert_rows
from tiny_engine import Watched

PAIR = tiny.GOLDEN / tiny.PAIRS[0]
STEM = np.random.default_rng(1).integers(0, 90, 40).tolist()
OTHER = np.random.default_rng(2).integers(0, 90, 50).tolist()
PARAMS = dj.SamplingParams(max_tokens=16)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine.engine(
        PAIR / "target",
        PAIR / "drafter",
        row_sizes=(1, 4),
        max_seq_len=96,
        max_batch_size=4,
        max_num_tokens=32,
    )


@pytest.fixture(scope="module")
def cold(engine: Engine) -> dict[tuple[int, ...], Row]:
    """What prompts give that take nothing over."""
    prompts = [STEM + tail for tail in ([], [7], [8, 9], [3] * 20)] + [STEM[:25], OTHER]
    batch = Batch(engine, reuse=False)
    return {
        tuple(p): tiny_engine.serve(batch, [tiny_engine.request(p, PARAMS)])[0] for p in prompts
    }


def assert_same(row: Row, cold: dict[tuple[int, ...], Row]) -> None:
    other = cold[tuple(row.prompt)]
    assert row.token_ids == other.token_ids
    assert row.stats.accepted_drafts_per_round == other.stats.accepted_drafts_per_round
    assert row.stats.drafts_per_round == other.stats.drafts_per_round


def serve(batch: Batch, prompt: list[int]) -> Row:
    return tiny_engine.serve(batch, [tiny_engine.request(prompt, PARAMS)])[0]


def test_reused_tokens_are_not_computed_again_and_acceptance_is_that_of_a_cold_run(engine, cold):
    """Fault 45: the slot had another owner before, and the second prompt goes on differently."""
    exact = Exact(PAIR / "target", PAIR / "drafter")
    watched = Watched(engine, exact)
    batch = exact.batch = Batch(watched)
    assert_same(serve(batch, OTHER), cold)
    assert_same(serve(batch, [*STEM, 7]), cold)
    watched.computed.clear()
    row = serve(batch, [*STEM, 8, 9])
    assert_same(row, cold)
    assert sum(watched.computed) == 2
    assert (row.stats.reused_prompt_tokens, row.stats.context_reused_tokens) == (40, 40)
    assert batch.load().prefix_tokens == 40
    assert exact.rounds > 5


@pytest.mark.parametrize("left", [0, 1, 8, 25])
def test_a_prompt_that_is_there_to_the_last_token_is_no_empty_chunk(engine, cold, left: int):
    """Fault 50: what is held is the prompt and more, the prompt, or all but 1 and 8 of it."""
    prompt = [*STEM, *[3] * 20]
    watched = Watched(engine)
    batch = Batch(watched)
    serve(batch, prompt[: len(prompt) - left])
    watched.computed.clear()
    assert_same(serve(batch, prompt), cold)
    assert sum(watched.computed) == max(left, 1)
    assert all(watched.computed)


def test_a_running_requests_prompt_is_shared_and_its_own_drafts_stay_as_they_are(engine, cold):
    """Fault 46: B, C, D are admitted on A's prefix while A decodes."""
    batch = Batch(Watched(engine))
    first = tiny_engine.request(STEM, PARAMS)
    batch.submit(first)
    while len(first.generated) < 4:
        batch.step()
    others = [tiny_engine.request(STEM + tail, PARAMS) for tail in ([7], [8, 9], [3] * 20)]
    rows = [first, *tiny_engine.serve(batch, others)]
    while any(row.finish_reason is None for row in rows):
        batch.step()
    for row in rows:
        assert_same(row, cold)
    assert [row.stats.reused_prompt_tokens for row in others] == [40, 40, 40]


def test_n_answers_compute_their_prompt_once(engine):
    watched = Watched(engine)
    batch = Batch(watched)
    params = dj.SamplingParams(max_tokens=5)
    tiny_engine.serve(batch, [tiny_engine.request(STEM, params) for _ in range(4)])
    assert sum(watched.computed) == len(STEM) + 3


def test_without_reuse_every_prompt_is_computed(engine, cold):
    watched = Watched(engine)
    batch = Batch(watched, reuse=False)
    for _ in range(2):
        assert_same(serve(batch, STEM), cold)
    assert sum(watched.computed) == 2 * len(STEM) and batch.load().prefix_hits == 0


def test_an_interrupted_request_that_comes_again_as_a_prompt_goes_on_as_before(engine, cold):
    """Fault 67: prompt + 7, then + 9 generated ids as new prompts."""
    batch = Batch(engine)
    for count in (7, 9):
        whole = cold[tuple(STEM)]
        params = dj.SamplingParams(max_tokens=16 - count)
        prompt = [*STEM, *whole.token_ids[:count]]
        row = tiny_engine.serve(batch, [tiny_engine.request(prompt, params)])[0]
        assert row.token_ids == whole.token_ids[count:]


def test_a_drafter_with_a_ring_drafts_from_the_tail_and_the_stats_say_so(tmp_path: Path):
    """A ring holds the last positions alone: the text is the same, the context begins late."""
    target = tiny.write_target(tmp_path / "target")
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
    window |= {"use_sliding_window": True}
    drafter = tiny.write_drafter(tmp_path / "drafter", **window)
    engine = tiny_engine.engine(target, drafter, max_seq_len=96, max_batch_size=1)
    oracle = NumpyTarget(target)
    batch = Batch(engine)
    serve(batch, STEM)
    row = serve(batch, [*STEM, 7, 8])
    assert row.token_ids == oracle.greedy([*STEM, 7, 8], 16)
    assert (row.stats.reused_prompt_tokens, row.stats.context_reused_tokens) == (40, 0)
    assert row.stats.num_drafts > 0


def test_a_tail_is_drafted_from_at_slot_local_positions(engine):
    """Its rows are those of a context that begins with the tail."""
    batch = Batch(engine)
    serve(batch, STEM)
    batch._slots._context_limit = 0  # type: ignore[attr-defined]
    row = tiny_engine.request([*STEM, 7, 8], dj.SamplingParams(max_tokens=2))
    tiny_engine.serve(batch, [row])
    held = [*STEM, 7, 8, *row.generated[:-1]]
    outputs = NumpyTarget(PAIR / "target").forward(held).outputs[:, 40:]
    wanted = NumpyContext(PAIR / "drafter").rows(outputs)
    context = tiny_engine.snapshot(engine.state).context
    assert context is not None
    assert int(context.lengths[0]) == len(held) - 40
    assert_rows(context, 0, wanted, len(held) - 40)
