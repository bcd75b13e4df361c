"""The thread around an engine: who hears what, when it is full, how it ends and how it fails.

A scripted engine stands in (`fake_llm.py`), which fails the test if two threads ever use it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_jax.errors import EngineError, RequestError
from dflash_jax.serving.job import Job, Update
from dflash_jax.serving.request import SamplingParams
from dflash_jax.serving.service import QueueFull, Service, ServiceStopped
from fake_llm import FakeLLM, answer_ids

PROMPT = [5, 6]
SOON = 10.0  # seconds; what a test waits for comes within milliseconds


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(slots=2)


@pytest.fixture
def service(llm: FakeLLM) -> Iterator[Service]:
    with Service(llm, max_queue=2) as service:
        yield service


def ignore(update: Update) -> None:
    """A listener that does not care."""


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_updates_joined_are_the_completion_and_each_tells_its_rounds(service: Service):
    heard: list[Update] = []
    job = service.submit(PROMPT, params(9, n=2), heard.append)
    completion = job.completion(SOON)
    for choice, one in enumerate(completion.choices):
        mine = [update for update in heard if update.choice == choice]
        joined = [token for update in mine for token in update.piece.token_ids]
        assert joined == one.token_ids == answer_ids(PROMPT, 9)
        # The prompt's own token, then rounds that accept 0, 1, 2, 3 drafts, the last one cut.
        assert [update.accepted for update in mine] == [[], [0], [1], [2], [3]]
        assert [u.piece.finish_reason for u in mine] == [None, None, None, None, "length"]
    times = [update.at for update in heard]
    assert job.submitted <= times[0] and times == sorted(times)
    assert job.outcome == "done" and job.seconds is not None and job.seconds > 0


def test_many_threads_submit_at_once_and_each_gets_its_own_answer(llm: FakeLLM):
    answers: dict[int, list[int]] = {}
    with Service(llm) as service:

        def ask(number: int) -> None:
            job = service.submit([number], params(10), ignore)
            answers[number] = job.completion(SOON).token_ids

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 33)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    assert answers == {number: answer_ids([number], 10) for number in range(1, 33)}


def test_a_refused_request_raises_where_it_was_submitted_and_harms_nobody(service: Service):
    with pytest.raises(RequestError, match="served length of 64"):
        service.submit(PROMPT, params(100), ignore)
    with pytest.raises(RequestError, match="n=5: 2 answers decode at a time and 2 may wait"):
        service.submit(PROMPT, params(n=5), ignore)
    assert service.submit(PROMPT, params(), ignore).completion(SOON).finish_reason == "length"
    assert service.drain(SOON)


def test_a_full_queue_refuses_with_its_numbers_and_takes_requests_again(
    llm: FakeLLM, service: Service
):
    llm.paused = True
    jobs = [service.submit(PROMPT, params(), ignore) for _ in range(4)]
    with pytest.raises(QueueFull, match="4 answers wait, of 2 that may.* add 1") as full:
        service.submit(PROMPT, params(), ignore)
    assert 1 <= full.value.retry_after <= 60
    llm.paused = False
    for job in jobs:
        job.completion(SOON)
    assert service.submit(PROMPT, params(), ignore).completion(SOON).error is None


@pytest.mark.parametrize("moment", ["waiting", "decoding", "in its own listener"])
def test_a_cancelled_request_ends_once_with_abort_and_the_next_one_is_whole(
    moment: str, llm: FakeLLM, service: Service
):
    """Fault 66."""
    heard: list[Update] = []
    jobs: list[Job] = []

    def listen(update: Update) -> None:
        heard.append(update)
        if moment == "in its own listener" and len(heard) == 1:
            until(lambda: bool(jobs))
            jobs[0].cancel()

    llm.paused = moment == "waiting"
    jobs.append(job := service.submit(PROMPT, params(40), listen))
    if moment == "decoding":
        until(lambda: bool(heard))
    job.cancel()
    job.cancel()
    completion = job.completion(SOON)
    llm.paused = False
    after = service.submit(PROMPT, params(), ignore).completion(SOON)
    assert after.token_ids == answer_ids(PROMPT, 8)
    job.cancel()
    assert service.drain(SOON)
    if job.outcome == "cancelled":  # else it came to its end first, which a cancel may not change
        assert completion.finish_reason == "abort"
        assert [u.piece.finish_reason for u in heard].count("abort") == 1
    else:
        assert moment == "decoding" and completion.token_ids == answer_ids(PROMPT, 40)
    joined = [token for update in heard for token in update.piece.token_ids]
    assert joined == completion.token_ids == answer_ids(PROMPT, len(joined))


def test_cancelling_what_has_ended_changes_nothing(service: Service):
    job = service.submit(PROMPT, params(), ignore)
    completion = job.completion(SOON)
    job.cancel()
    service.submit(PROMPT, params(), ignore).completion(SOON)  # the cancel has been carried out
    assert job.outcome == "done" and not job.cancelled
    assert completion.finish_reason == "length"


def test_a_deadline_is_the_requests_own_or_the_services(llm: FakeLLM):
    llm.paused = True
    with Service(llm, default_timeout=0.02) as service:
        ended = service.submit(PROMPT, params(), ignore)
        assert ended.completion(SOON).finish_reason == "abort"
        assert ended.outcome == "timeout"
        longer = service.submit(PROMPT, params(), ignore, timeout=SOON)
        time.sleep(0.05)
        llm.paused = False
        assert longer.completion(SOON).error is None


def test_an_answer_that_the_engine_aborts_has_failed_and_others_go_on(
    llm: FakeLLM, service: Service
):
    llm.row_errors[(9,)] = "its logits became NaN"
    bad, good = (service.submit(prompt, params(), ignore) for prompt in ([9], PROMPT))
    assert bad.completion(SOON).error == "its logits became NaN"
    assert bad.outcome == "failed"
    assert good.completion(SOON).token_ids == answer_ids(PROMPT, 8)
    assert service.ready and service.error is None


def test_a_listener_that_raises_loses_its_own_request_only(service: Service):
    def raises(update: Update) -> None:
        raise ValueError("nobody listens")

    bad = service.submit(PROMPT, params(40), raises)
    good = service.submit(PROMPT, params(), ignore)
    assert good.completion(SOON).token_ids == answer_ids(PROMPT, 8)
    bad.completion(SOON)
    assert service.ready


def test_when_the_engine_fails_every_open_request_hears_of_it(llm: FakeLLM, service: Service):
    heard: list[Update] = []
    llm.paused = True
    jobs = [service.submit(PROMPT, params(), heard.append) for _ in range(3)]
    llm.failure = EngineError("the engine failed 4 times in a row")
    for job in jobs:
        assert job.completion(SOON).finish_reason == "abort"
        assert job.outcome == "failed"
    assert [update.piece.finish_reason for update in heard] == ["abort"] * 3
    until(lambda: not service.alive)
    assert service.error is llm.failure and not service.ready
    with pytest.raises(ServiceStopped, match="must be started again"):
        service.submit(PROMPT, params(), ignore)
    assert service.drain(SOON)


def test_drain_waits_for_the_open_requests_and_takes_no_new_ones(llm: FakeLLM, service: Service):
    llm.paused = True
    job = service.submit(PROMPT, params(), ignore)
    assert not service.drain(0.01)
    assert service.alive and not service.ready
    with pytest.raises(ServiceStopped, match="is shutting down"):
        service.submit(PROMPT, params(), ignore)
    llm.paused = False
    assert service.drain(SOON)
    assert job.completion(0.0).finish_reason == "length"


def test_shutdown_ends_what_is_open_and_the_thread(llm: FakeLLM):
    heard: list[Update] = []
    llm.paused = True
    with Service(llm) as service:
        jobs = [service.submit(PROMPT, params(n=2), heard.append) for _ in range(2)]
        service.shutdown()
    assert not service.alive and not service.ready
    assert [job.outcome for job in jobs] == ["cancelled"] * 2
    assert [update.piece.finish_reason for update in heard] == ["abort"] * 4
    assert not llm.waiting and not llm.running
    with pytest.raises(ServiceStopped, match="has been shut down"):
        service.submit(PROMPT, params(), ignore)


def test_a_request_between_two_threads_is_answered_or_refused_when_the_service_ends(llm: FakeLLM):
    ends: list[str] = []

    def ask() -> None:
        try:
            while True:
                service.submit(PROMPT, params(), ignore).completion(SOON)
                ends.append("answered")
        except ServiceStopped:
            ends.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with Service(llm) as service:
        for thread in threads:
            thread.start()
        until(lambda: len(ends) > 20)
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
    assert ends.count("refused") == 4


def test_the_load_is_that_of_the_latest_step(llm: FakeLLM, service: Service):
    assert (service.load.slots, service.load.rounds) == (2, 0)
    service.submit(PROMPT, params(9), ignore).completion(SOON)
    service.drain(SOON)
    until(lambda: service.load.rounds == 4)
    assert service.load.accepted == 6
