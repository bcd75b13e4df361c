"""A real engine behind the server: the tiny pair's own answers, over HTTP, many at once.

What the endpoints make of errors and limits is in `test_serving_server.py`.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.serving.service import Service
from serving_http import SOON, Site, running
from tiny_served import start

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPTS: tuple[str, ...] = ("hi", "what is it?", "ö", "hi there", "x" * 40)


class Served:
    """The engine, what it answers alone, and the server around it."""

    def __init__(self, llm: dj.LLM, site: Site, alone: dict[str, dj.Completion]):
        self.llm, self.site, self.alone = llm, site, alone


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    llm = start(tmp_path_factory.mktemp("end_to_end"))
    params = dj.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    alone = {prompt: llm.generate(prompt, params)[0] for prompt in PROMPTS}
    with Service(llm) as service, running(service) as site:
        yield Served(llm, site, alone)
    assert llm.compiles_in_service == 0


def texts(answer: Any) -> list[str]:
    assert answer.status == 200
    return [one["text"] for one in answer.document["choices"]]


def test_many_clients_at_once_each_get_what_the_prompt_gives_alone(served: Served):
    answers: dict[tuple[str, bool], str] = {}

    def ask(prompt: str, stream: bool) -> None:
        answer = served.site.complete(prompt, **GREEDY, stream=stream)
        if stream:
            text = "".join(chunk["choices"][0]["text"] for chunk in answer.events)
        else:
            (text,) = texts(answer)
        answers[prompt, stream] = text

    threads = [
        threading.Thread(target=ask, args=(prompt, stream))
        for prompt in PROMPTS
        for stream in (False, True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert answers == {
        (prompt, stream): served.alone[prompt].text
        for prompt in PROMPTS
        for stream in (False, True)
    }


def test_usage_counts_the_tokens_and_those_that_were_taken_over(served: Served):
    first, again = (served.site.complete("one two three four", **GREEDY).document for _ in range(2))
    for one in (first, again):
        assert one["usage"]["prompt_tokens"] == 18
        assert one["usage"]["completion_tokens"] == 12
    reused = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < reused == again["dflash"]["reused_prompt_tokens"] < 18
    assert first["choices"][0]["text"] == again["choices"][0]["text"]


def test_logprobs_are_those_of_the_target(served: Served):
    """Fault 113."""
    for prompt in PROMPTS:
        found = served.site.complete(prompt, **GREEDY, logprobs=2).document["choices"][0]
        expected = served.alone[prompt].logprobs
        assert expected is not None
        got = found["logprobs"]["token_logprobs"]
        assert got == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert len(got) == 12 and all(value < 0 for value in got)
        assert [len(tops) >= 2 for tops in found["logprobs"]["top_logprobs"]] == [True] * 12


def test_a_seed_gives_the_same_text_again_and_another_seed_another(served: Served):
    """Fault 17."""

    def sampled(seed: int, **options: Any) -> list[str]:
        given = {**GREEDY, "temperature": 1.5, "seed": seed, **options}
        return texts(served.site.complete("hi", **given))

    assert sampled(1) == sampled(1) != sampled(2)
    first, second = sampled(1, n=2)
    assert [first] == sampled(1) and first != second
    assert sampled(1, top_k=1) == [served.alone["hi"].text]
    assert sampled(1, speculate=False) == sampled(1)


def test_the_drafted_rounds_of_a_stream_add_up_to_its_figures(served: Served):
    """Fault 93."""
    chunks = served.site.complete("hi", **GREEDY, stream=True).events
    accepted = [count for chunk in chunks for count in chunk["dflash"]["accepted"]]
    figures = chunks[-1]["dflash"]
    assert figures["speculation"] == "dflash"
    assert figures["max_draft_len"] == served.llm.config.max_draft_len
    assert (len(accepted), sum(accepted)) == (
        figures["num_rounds"],
        figures["num_accepted_drafts"],
    )
    assert figures["num_drafts"] > 0
    plain = served.site.complete("hi", **GREEDY, speculate=False).document
    assert (plain["dflash"]["speculation"], plain["dflash"]["num_drafts"]) == ("none", 0)
    assert plain["choices"][0]["text"] == served.alone["hi"].text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_clients_that_vanish_leave_no_slot_behind(stream: bool, served: Served):
    """Fault 66."""
    for number in range(6):
        body = {"prompt": PROMPTS[number % 5], "max_tokens": 20, "n": 2, "stream": stream}
        with contextlib.closing(served.site.open("/v1/completions", **body)) as client:
            if stream and number % 2:
                client.recv(10)
    end = time.monotonic() + SOON
    while (load := busy(served.site)) != (0, 0):
        assert time.monotonic() < end, load
    assert texts(served.site.complete("hi", **GREEDY)) == [served.alone["hi"].text]


def busy(site: Site) -> tuple[float, float]:
    """Answers that wait, and slots that are held."""
    lines = site.get("/metrics").body.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return float(found["dflash_queue_waiting"]), float(found["dflash_slots_busy"])


def test_a_chat_is_the_templates_prompt(served: Served):
    answer = served.site.chat("hi", **GREEDY).document
    ids = served.site.complete([256, 104, 105, 259, 257], **GREEDY).document
    assert answer["choices"][0]["message"]["content"] == ids["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == 5


def test_nothing_compiled_while_serving(served: Served):
    """Fault 105."""
    metrics = served.site.get("/metrics").body.decode()
    assert "dflash_compiles_in_service 0.0" in metrics
    assert served.site.get("/health").document["compiles_in_service"] == 0
