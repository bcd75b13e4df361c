"""What requests survive: lost arenas, a request that breaks every execution, NaN, cancels, time.

Executions fail after they took their arenas, as the runtime does it: the donated ones are gone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.errors import EngineError
from dflash_jax.serving.batch import Batch
from dflash_jax.serving.engine import Engine
from dflash_jax.serving.recovery import MOST_FAILURES
from dflash_jax.serving.row import Row

SERVED = 64
PROMPTS = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in (5, 20, 11, 33)]


class Failing:
    """An engine's programs, of which those fail that `when(name, arguments)` says."""

    def __init__(self, programs: Any, when: Callable[[str, tuple[Any, ...]], bool]):
        self.programs, self.when = programs, when
        self.failures = 0

    def __getitem__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.when(name, arguments):
                self.failures += 1
                self.programs[name](*arguments)  # the arenas are donated and lost
                raise jax.errors.JaxRuntimeError("INTERNAL: injected")
            return self.programs[name](*arguments)

        return call


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = tiny.write_target(folder / "target"), tiny.write_drafter(folder / "drafter")
    return tiny_engine.engine(target, drafter, max_seq_len=SERVED, max_batch_size=4)


def asked() -> list[Row]:
    """Greedy, sampled, penalised, with log-probabilities: all that is kept on the device."""
    params = [
        dj.SamplingParams(max_tokens=20),
        dj.SamplingParams(max_tokens=20, temperature=1.0, seed=7),
        dj.SamplingParams(max_tokens=20, repetition_penalty=1.4, frequency_penalty=0.8),
        dj.SamplingParams(max_tokens=20, temperature=0.7, seed=1, min_tokens=9, logprobs=2),
    ]
    ends = [(), (), (), (3, 5, 8)]
    return [
        tiny_engine.request(prompt, one, eos=eos)
        for prompt, one, eos in zip(PROMPTS, params, ends, strict=True)
    ]


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> list[Row]:
    return tiny_engine.serve(Batch(engine), asked())


def with_failures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: Callable[[str, tuple[Any, ...]], bool]
) -> Failing:
    failing = Failing(engine.programs, when)
    monkeypatch.setattr(engine, "programs", failing)
    return failing


def at_calls(*numbers: int, name: str) -> Callable[[str, tuple[Any, ...]], bool]:
    """True for the given calls (from 1) of programs that begin with `name`."""
    seen = iter(range(1, 10**9))
    return lambda called, arguments: called.startswith(name) and next(seen) in numbers


def assert_same(rows: Sequence[Row], others: Sequence[Row]) -> None:
    for row, other in zip(rows, others, strict=True):
        assert (row.token_ids, row.finish_reason) == (other.token_ids, other.finish_reason)
        assert row.error is None
        assert row.stats.accepted_drafts_per_round == other.stats.accepted_drafts_per_round
        assert (row.output.logprobs is None) == (other.output.logprobs is None)
        for mine, theirs in zip(
            row.output.logprobs or (), other.output.logprobs or (), strict=True
        ):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("round", (1,)), ("round", (4, 9)), ("prefill", (1,)), ("prefill", (3,)), ("open", (2,))],
)
def test_after_lost_arenas_everybody_goes_on_with_the_same_text(
    engine: Engine, undisturbed, monkeypatch, name: str, calls: tuple[int, ...]
):
    """Faults 67, 103: seeds, counts, log-probabilities and traces too."""
    failing = with_failures(engine, monkeypatch, at_calls(*calls, name=name))
    batch = Batch(engine)
    rows = tiny_engine.serve(batch, asked())
    assert failing.failures == len(calls)
    assert_same(rows, undisturbed)
    assert batch.load().recoveries == len(calls) and batch.load().free_slots == 4
    if name == "round":
        assert max(row.stats.recoveries for row in rows) == len(calls)


def test_what_surfaces_only_when_it_is_read_is_survived_as_well(
    engine: Engine, undisturbed, monkeypatch
):
    calls, read = iter(range(100)), engine.read_round

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: injected")
        return read(*arguments, **options)

    monkeypatch.setattr(engine, "read_round", failing)
    assert_same(tiny_engine.serve(Batch(engine), asked()), undisturbed)


def test_the_one_that_breaks_every_execution_is_failed_and_nobody_else(
    engine: Engine, undisturbed, monkeypatch, caplog
):
    """It is tried alone once; the others pass their trial and go on."""
    batch, rows = Batch(engine), asked()
    offender = rows[1]

    def when(name: str, arguments: tuple[Any, ...]) -> bool:
        if not name.startswith("round") or offender.slot is None:
            return False
        active = np.asarray(arguments[-1])
        return offender.slot < len(active) and bool(active[offender.slot])

    failing = with_failures(engine, monkeypatch, when)
    tiny_engine.serve(batch, rows)
    assert failing.failures == 2
    assert offender.finish_reason == "abort"
    assert "alone too: INTERNAL: injected" in (offender.error or "")
    assert offender.token_ids == undisturbed[1].token_ids[: len(offender.token_ids)]
    others = [0, 2, 3]
    assert_same([rows[i] for i in others], [undisturbed[i] for i in others])
    assert batch.load().free_slots == 4


def test_a_prompt_that_breaks_its_prefill_is_failed_after_one_more_try(
    engine: Engine, undisturbed, monkeypatch
):
    batch, rows = Batch(engine), asked()

    def when(name: str, arguments: tuple[Any, ...]) -> bool:
        return name.startswith("prefill") and int(arguments[-1].slots[0]) == rows[3].slot

    failing = with_failures(engine, monkeypatch, when)
    tiny_engine.serve(batch, rows)
    assert failing.failures == 2 and rows[3].finish_reason == "abort"
    assert_same(rows[:3], undisturbed[:3])


def test_an_engine_that_only_fails_answers_everybody_with_an_error(engine: Engine, monkeypatch):
    """Each goes well alone and all together fail: nobody is at fault, so the engine is."""

    def when(name: str, arguments: tuple[Any, ...]) -> bool:
        return name.startswith("round") and int(np.asarray(arguments[-1]).sum()) > 1

    failing = with_failures(engine, monkeypatch, when)
    batch, rows = Batch(engine), asked()
    for row in rows:
        batch.submit(row)
    with pytest.raises(EngineError, match="failed 4 times in a row and aborted 4 requests"):
        for _ in range(200):
            batch.step()
    assert failing.failures == MOST_FAILURES + 1
    assert [row.finish_reason for row in rows] == ["abort"] * 4
    assert all("the engine failed" in (row.error or "") for row in rows)
    updates = batch.step()
    assert {id(row) for row, _ in updates} == {id(row) for row in rows}


def poison(engine: Engine, slot: int) -> None:
    """A NaN in the slot's oldest keys: every later pass of that row reads it."""
    layer = engine.state.kv.layers[0]
    bad = layer._replace(keys=layer.keys.at[slot, :, 0].set(jnp.nan))
    layers = (bad, *engine.state.kv.layers[1:])
    engine.state = engine.state._replace(kv=engine.state.kv._replace(layers=layers))


def test_a_row_that_became_nan_is_aborted_its_slot_zeroed_and_nobody_else_harmed(
    engine: Engine, undisturbed
):
    batch, rows = Batch(engine), asked()
    for row in rows:
        batch.submit(row)
    while min(len(row.generated) for row in rows) < 3:
        batch.step()
    slot = rows[0].slot
    assert slot is not None
    poison(engine, slot)
    while any(row.finish_reason is None for row in rows):
        batch.step()
    assert rows[0].finish_reason == "abort" and "NaN" in (rows[0].error or "")
    assert rows[0].token_ids == undisturbed[0].token_ids[: len(rows[0].token_ids)]
    assert_same(rows[1:], undisturbed[1:])
    for leaf in jax.tree.leaves((engine.state.kv.layers, engine.state.context)):
        assert not np.any(np.isnan(np.asarray(leaf)))
    # The slot serves again, and what it held is taken over by nobody.
    again = tiny_engine.serve(batch, [asked()[0]])
    assert_same(again, undisturbed[:1])


def test_a_prompt_whose_logits_are_nan_is_aborted_before_its_first_token(engine: Engine):
    batch = Batch(engine)
    stem = PROMPTS[3]
    tiny_engine.serve(batch, [tiny_engine.request(stem, dj.SamplingParams(max_tokens=2))])
    poison(engine, 0)
    (row,) = tiny_engine.serve(
        batch, [tiny_engine.request([*stem, 1], dj.SamplingParams(max_tokens=5))]
    )
    assert row.stats.reused_prompt_tokens == len(stem)
    assert (row.finish_reason, row.token_ids) == ("abort", [])
    assert not np.any(np.isnan(np.asarray(engine.state.kv.layers[0].keys)))


@pytest.mark.parametrize("steps", range(8))
def test_a_request_cancelled_at_any_moment_frees_its_slot_for_the_next(
    engine: Engine, undisturbed, steps: int
):
    """Fault 66: queued, mid-prompt, after the first token, mid-answer; twice; and at once a new."""
    batch, rows = Batch(engine), asked()
    fifth = tiny_engine.request(PROMPTS[0], dj.SamplingParams(max_tokens=20))
    for row in (*rows, fifth):
        batch.submit(row)
    for _ in range(steps):
        batch.step()
    victim = fifth if steps == 0 else rows[2]
    batch.cancel(victim, "asked for")
    batch.cancel(victim, "again")
    late = tiny_engine.request(PROMPTS[0], dj.SamplingParams(max_tokens=20))
    batch.submit(late)
    while any(row.finish_reason is None for row in (*rows, fifth, late)):
        batch.step()
    assert (victim.finish_reason, victim.error) == ("abort", "asked for")
    assert_same([rows[0], rows[1], rows[3]], [undisturbed[i] for i in (0, 1, 3)])
    assert late.token_ids == undisturbed[0].token_ids
    assert batch.load().free_slots == 4


def test_a_request_beyond_its_deadline_is_aborted_wherever_it_is(engine: Engine):
    batch = Batch(engine)
    running, queued = asked()[0], tiny_engine.request(PROMPTS[1], dj.SamplingParams(max_tokens=9))
    queued.deadline, running.deadline = 0.0, 1e12
    batch.submit(queued)
    assert batch.step()[0][1].finish_reason == "abort"
    batch.submit(running)
    while not running.generated:
        batch.step()
    running.deadline = 0.0
    batch.step()
    assert running.finish_reason == "abort" and "deadline" in (running.error or "")
    assert batch.load().free_slots == 4
