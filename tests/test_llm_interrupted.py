"""What calls leave behind that end early: no request, no slot, and arenas that are whole.

Streams that are closed or read in turn, exceptions in the middle of a call, programs that fail
after they took their arenas.
"""

from collections.abc import Generator
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
import tiny_served
from tiny_served import FIRST, PARAMS, SECOND, SMALL, THIRD


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> dj.LLM:
    return tiny_served.start(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def solo(llm) -> dict[tuple[int, ...], list[int]]:
    return tiny_served.alone(llm)


def assert_nothing_is_left(llm: dj.LLM) -> None:
    """No request waits or holds a slot, and no array of the arenas is a donated one."""
    load = llm.load()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    assert load.free_slots == SMALL["max_batch_size"]
    leaves = jax.tree.leaves(llm._engine.state)
    assert not any(leaf.is_deleted() for leaf in leaves)


def finished(stream: Generator[str, None, dj.Completion]) -> tuple[str, dj.Completion]:
    """All pieces joined, and what the stream returns."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return "".join(pieces), end.value


TEXT = "ab"
LONG = dj.SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_stream_gives_the_text_of_the_whole_answer(llm):
    text, answer = finished(llm.stream(TEXT, LONG))
    assert answer.token_ids == llm.generate([TEXT], LONG)[0].token_ids
    assert text == answer.text
    assert_nothing_is_left(llm)


def test_a_stream_left_early_frees_its_slot(llm, solo):
    for prompt in (TEXT, "cd", "ef"):
        stream = llm.stream(prompt, LONG)
        next(stream)
        stream.close()
        assert_nothing_is_left(llm)
    assert llm.generate([FIRST], PARAMS)[0].token_ids == solo[tuple(FIRST)]


def test_a_stream_that_was_never_read_holds_nothing(llm):
    streams = [llm.stream(TEXT, LONG) for _ in range(3)]
    for stream in streams:
        stream.close()
    assert_nothing_is_left(llm)


def test_two_streams_read_in_turn_give_what_each_gives_alone(llm):
    prompts = ("first", "and the second")
    alone = [finished(llm.stream(prompt, LONG)) for prompt in prompts]
    streams = [llm.stream(prompt, LONG) for prompt in prompts]
    texts, answers = ["", ""], {}
    while len(answers) < 2:
        for index, stream in enumerate(streams):
            if index in answers:
                continue
            try:
                texts[index] += next(stream)
            except StopIteration as end:
                answers[index] = end.value
    for index, (text, answer) in enumerate(alone):
        assert texts[index] == text
        assert answers[index].token_ids == answer.token_ids
    assert_nothing_is_left(llm)


class Broken(Exception):
    """Stands for anything that ends a call in the middle."""


def failing_at(count: int, call: Any) -> Any:
    """The same call, but the `count`-th one fails *after* it has done its work."""
    calls = iter(range(count))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if next(calls, None) == count - 1:
            raise Broken
        return out

    return wrapped


@pytest.mark.parametrize("name", ["start_round", "read_round", "prefill", "open"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_exception_in_the_middle_leaves_no_request_behind(llm, solo, monkeypatch, name, count):
    """Fault 103: also when the arenas have moved on and their report is lost."""
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, name, failing_at(count, getattr(llm._engine, name)))
        with pytest.raises(Broken):
            llm.generate([FIRST, SECOND, THIRD], PARAMS)
    assert_nothing_is_left(llm)
    again = llm.generate([FIRST, SECOND, THIRD], PARAMS)
    assert [answer.token_ids for answer in again] == list(solo.values())


def test_an_exception_in_a_progress_callback_leaves_no_request_behind(llm, solo, monkeypatch):
    def broken(*args: object) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_progress", broken)
        with pytest.raises(Broken):
            llm.generate([FIRST, SECOND, THIRD], PARAMS)
    assert_nothing_is_left(llm)
    assert llm.generate([SECOND], PARAMS)[0].token_ids == solo[tuple(SECOND)]


@pytest.mark.parametrize("program", ["open", "prefill-32", "round-1-greedy"])
def test_a_program_that_fails_after_taking_its_arenas_leaves_whole_ones(
    llm, solo, monkeypatch, program
):
    """Fault 103: donated and never handed back."""
    failing = failing_at(1, llm.programs[program])
    before = llm.compiles_in_service
    with monkeypatch.context() as patch:
        patch.setitem(llm._engine.programs, program, failing)
        with pytest.raises(Broken):
            llm.generate([FIRST], PARAMS)
    assert_nothing_is_left(llm)
    assert llm.generate([FIRST], PARAMS)[0].token_ids == solo[tuple(FIRST)]
    assert llm.compiles_in_service == before


def test_a_stream_whose_round_was_lost_to_another_goes_on_with_the_same_text(llm, monkeypatch):
    """The arenas may have moved without a report: it is prefilled again from what it committed."""
    whole = llm.generate(["first"], LONG)[0]
    stream = llm.stream("first", LONG)
    text = next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "start_round", failing_at(1, llm._engine.start_round))
        with pytest.raises(Broken):
            llm.generate([SECOND], PARAMS)
    rest, answer = finished(stream)
    assert (text + rest, answer.token_ids) == (whole.text, whole.token_ids)
    assert (answer.error, answer.stats.recoveries) == (None, 1)
    assert_nothing_is_left(llm)


def test_no_array_of_the_state_is_passed_twice(llm):
    """Fault 103: a buffer under two names cannot be donated."""
    leaves = [leaf for leaf in jax.tree.leaves(llm._engine.state) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_arenas_that_were_handed_out_are_donated_by_the_next_call(llm):
    """Fault 103: the old ones say so when they are read; the new ones are whole."""
    old = llm.arenas
    llm.generate([FIRST], PARAMS)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.kv.lengths)
    assert np.asarray(llm.arenas.kv.lengths).shape == (2,)
