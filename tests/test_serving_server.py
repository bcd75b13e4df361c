"""The endpoints over real sockets, with a scripted engine behind them (`fake_llm.py`).

What a real engine answers through them is in `test_serving_end_to_end.py`.
"""

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from byte_tokenizer import byte_level, write_folder
from dflash_jax.errors import EngineError
from dflash_jax.serving.service import Service
from dflash_jax.serving.text import Tokenizer
from fake_llm import FakeLLM, answer_ids
from serving_http import SOON, Site, running
from tiny_text import SPECIALS, TEMPLATE

KEY = "secret-ключ"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    folder = tmp_path_factory.mktemp("server")
    write_folder(folder, byte_level(SPECIALS), tokenizer_config=settings)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def llm(tokenizer: Tokenizer) -> FakeLLM:
    return FakeLLM(slots=2, tokenizer=tokenizer)


@pytest.fixture
def service(llm: FakeLLM) -> Iterator[Service]:
    with Service(llm, max_queue=2) as service:
        yield service


@pytest.fixture
def site(service: Service) -> Iterator[Site]:
    with running(service) as site:
        yield site


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def text(prompt: str | list[int], count: int) -> str:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return bytes(answer_ids(ids, count)).decode()


def test_a_completion_and_its_stream_are_the_same_text(site: Site):
    whole = site.complete("hi", max_tokens=9).document
    chunks = site.complete("hi", max_tokens=9, stream=True).events
    (choice,) = whole["choices"]
    assert choice["text"] == text("hi", 9) and choice["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all("usage" not in chunk for chunk in chunks)


def test_a_chat_streams_with_usage_and_the_drafts_of_every_round(site: Site):
    (*chunks, last) = site.chat(
        max_tokens=9, stream=True, stream_options={"include_usage": True}
    ).events
    assert [chunk["dflash"]["accepted"] for chunk in chunks] == [[], [0], [1], [2], [3]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    figures = chunks[-1]["dflash"]
    # Of the last round's four tokens two were delivered.
    assert (figures["num_rounds"], figures["num_accepted_drafts"]) == (4, 6)


def test_each_response_and_status_show_how_it_is_decoded(site: Site):
    """Fault 93."""
    drafted = site.chat(max_tokens=9).document["dflash"]
    plain = site.chat(max_tokens=9, speculate=False).document["dflash"]
    assert (drafted["speculation"], drafted["max_draft_len"]) == ("dflash", 3)
    assert (plain["speculation"], plain["max_draft_len"]) == ("none", 0)
    for path in ("/health", "/ready"):
        status = site.get(path).document
        assert (status["speculation"], status["max_draft_len"]) == ("dflash", 3)
    (model,) = site.get("/v1/models").document["data"]
    assert (model["dflash"]["speculation"], model["dflash"]["max_draft_len"]) == ("dflash", 3)


def test_prompts_times_n_choices_are_numbered_through_whole_and_streamed(site: Site):
    asked: dict[str, Any] = {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 5}
    whole = site.post("/v1/completions", **asked).document
    expected = [text("hi", 5)] * 2 + [text("ho", 5)] * 2
    assert [one["text"] for one in whole["choices"]] == expected
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2, 3]
    streamed = [""] * 4
    for chunk in site.post("/v1/completions", **asked, stream=True).events:
        for one in chunk["choices"]:
            streamed[one["index"]] += one["text"]
    assert streamed == expected
    assert whole["usage"]["prompt_tokens"] == 4 and whole["usage"]["completion_tokens"] == 20


def test_a_stop_string_is_not_delivered_and_not_counted(site: Site):
    stop = text("hi", 9)[4:6]
    document = site.complete("hi", max_tokens=9, stop=stop).document
    assert document["choices"][0]["text"] == text("hi", 4)
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 4


def test_logprobs_come_one_for_each_token_and_are_never_all_zero(site: Site):
    """Fault 113."""
    legacy = site.complete("hi", max_tokens=5, logprobs=2).document["choices"][0]["logprobs"]
    assert legacy["token_logprobs"] == [-0.5] * 5
    assert "".join(legacy["tokens"]) == text("hi", 5)
    assert legacy["text_offset"] == [0, 1, 2, 3, 4]
    content = site.chat(max_tokens=5, logprobs=True, top_logprobs=1).document
    entries = content["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in entries] == [-0.5] * 5
    assert [len(one["top_logprobs"]) for one in entries] == [1] * 5


def test_every_field_reaches_the_engine(site: Site, llm: FakeLLM):
    """Fault 17, from the wire to the engine."""
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "n": 2,
        "seed": 3,
        "stop": ["\n"],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"97": 2},
        "min_tokens": 1,
        "max_tokens": 4,
        "ignore_eos": True,
        "stop_token_ids": [300],
        "speculate": False,
        "logprobs": 1,
    }
    assert site.complete("hi", **given).status == 200
    reached = vars(llm.submitted[-1])
    lists = {"stop": ("\n",), "stop_token_ids": (300,), "logit_bias": {97: 2.0}}
    assert reached == given | lists


def test_the_request_id_is_taken_over_when_sane_and_made_otherwise(site: Site):
    assert (
        site.get("/health", **{"X-Request-Id": "job-7.a_B"}).headers["x-request-id"] == "job-7.a_B"
    )
    for bad in ("a b", "x" * 129, "<script>", ""):
        made = site.get("/nowhere", **{"X-Request-Id": bad}).headers["x-request-id"]
        assert made != bad and len(made) == 24
    answer = site.chat(max_tokens=2)
    assert answer.document["dflash"]["request_id"] == answer.headers["x-request-id"]
    assert answer.document["id"] == f"chatcmpl-{answer.headers['x-request-id']}"


WRONG = {
    "no json": (400, "POST", "/v1/completions", "{", None),
    "an array": (400, "POST", "/v1/completions", "[]", None),
    "no prompt": (400, "POST", "/v1/completions", "{}", "prompt"),
    "a wrong type": (400, "POST", "/v1/completions", '{"prompt": 5}', "prompt"),
    "an unknown field": (400, "POST", "/v1/completions", '{"prompt": "x", "foo": 1}', "foo"),
    "an empty prompt": (400, "POST", "/v1/completions", '{"prompt": ""}', None),
    "half a surrogate": (400, "POST", "/v1/completions", '{"prompt": "\\ud800"}', None),
    "another model": (404, "POST", "/v1/completions", '{"prompt": "x", "model": "o"}', "model"),
    "another model's page": (404, "GET", "/v1/models/o", None, "model"),
    "another url": (404, "GET", "/v1/nothing", None, None),
    "another method": (405, "GET", "/v1/completions", None, None),
    "too many tokens": (400, "POST", "/v1/completions", json.dumps({"prompt": "x" * 64}), "prompt"),
}


@pytest.mark.parametrize("status, method, path, body, param", WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_answered_in_openais_shape(
    status: int, method: str, path: str, body: str | None, param: str | None, site: Site
):
    answer = site.ask(method, path, body)
    assert answer.status == status
    assert answer.error["param"] == param
    assert answer.headers["x-request-id"]


def test_the_refusal_of_a_long_prompt_has_the_numbers(site: Site):
    message = site.complete("x" * 70).error["message"]
    assert "70 tokens" in message and "served length of 64" in message


def test_a_body_must_say_that_it_is_json(site: Site):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = site.ask("POST", "/v1/completions", '{"prompt": "x"}', {"Content-Type": kind})
        assert answer.status == 400 and "application/json" in answer.error["message"]
    kind = "Application/JSON; charset=utf-8"
    answer = site.ask("POST", "/v1/completions", '{"prompt": "x"}', {"Content-Type": kind})
    assert answer.status == 200


def test_a_large_body_is_refused_announced_or_in_chunks(service: Service):
    with running(service, max_body_bytes=200) as site:
        body = json.dumps({"prompt": "x" * 300})
        assert site.ask("POST", "/v1/completions", body).status == 413
        pieces = iter([body[:100].encode(), body[100:].encode()])  # sent without a length
        answer = site.ask("POST", "/v1/completions", pieces)
        assert answer.status == 413 and "200 bytes" in answer.error["message"]
        assert site.complete("hi", max_tokens=2).status == 200


def test_a_key_is_needed_for_everything_but_health_and_the_page(service: Service):
    with running(service, api_key=KEY) as site:
        for path in ("/", "/health", "/ready", "/openapi.json"):
            assert site.get(path).status == 200
        for path in ("/v1/models", "/v1/models/m", "/metrics"):
            right = f"Bearer {KEY}".encode().decode("latin-1")
            for wrong in ("", "Bearer", "Bearer ", "Bearer x", f"Basic {KEY[:6]}", KEY[:6]):
                answer = site.get(path, Authorization=wrong)
                assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert site.get(path, Authorization=right).status == 200
        assert site.chat().status == 401


def test_a_full_queue_is_429_and_says_when_to_come_back(site: Site, llm: FakeLLM):
    llm.paused = True
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(contextlib.closing(site.open("/v1/completions", prompt="hi")))
        until(lambda: len(llm.waiting) == 4)
        answer = site.complete("hi")
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        many = site.complete(["hi", "ho"])
        assert many.status == 429
    llm.paused = False
    until(lambda: site.complete("hi").status == 200)


def test_of_a_request_that_is_refused_halfway_nothing_stays(site: Site, llm: FakeLLM):
    llm.paused = True
    assert site.complete(["hi"] * 5).status == 429
    until(lambda: not llm.waiting)
    llm.paused = False
    assert site.complete("hi").status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", ["waiting", "decoding"])
def test_a_client_that_vanishes_cancels_its_request(
    moment: str, stream: bool, site: Site, llm: FakeLLM
):
    """Fault 66."""
    llm.paused = moment == "waiting"
    llm.config.max_seq_len = 100_000
    client = site.open("/v1/completions", prompt="hi", max_tokens=50_000, stream=stream)
    until(lambda: bool(llm.waiting if moment == "waiting" else llm.running))
    client.close()
    until(lambda: not llm.waiting and not llm.running)
    llm.paused = False
    assert site.complete("hi", max_tokens=5).document["choices"][0]["text"] == text("hi", 5)
    until(lambda: 'dflash_requests_total{outcome="cancelled"} 1.0' in metrics(site))


def metrics(site: Site) -> str:
    return site.get("/metrics").body.decode()


def test_a_client_that_does_not_read_holds_nobody_up(site: Site, llm: FakeLLM):
    llm.config.max_seq_len = 100_000
    with contextlib.closing(
        site.open("/v1/completions", prompt="hi", max_tokens=20_000, stream=True)
    ):
        assert site.complete("hi", max_tokens=5).document["choices"][0]["text"] == text("hi", 5)


def test_a_request_that_fails_is_a_500_without_its_reason_which_is_logged(
    site: Site, llm: FakeLLM, caplog: pytest.LogCaptureFixture
):
    llm.row_errors[tuple(b"bad")] = "INTERNAL: device memory at 0x1234"
    with caplog.at_level(logging.WARNING):
        answer = site.complete("bad")
    assert answer.status == 500
    assert "0x1234" not in answer.body.decode()
    request_id = answer.headers["x-request-id"]
    assert request_id in answer.error["message"]
    assert f"request {request_id}: INTERNAL: device memory at 0x1234" in caplog.text
    (*_, last) = site.complete("bad", stream=True).events
    assert last["error"]["code"] == "internal_error"
    assert site.complete("hi").status == 200


def test_a_fault_of_the_server_shows_no_traceback_and_is_logged_with_one(
    site: Site, llm: FakeLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(llm, "chat_ids", lambda messages: 1 // 0)
    answer = site.chat()
    assert answer.status == 500 and answer.error["type"] == "server_error"
    assert "division" not in answer.body.decode()
    assert "ZeroDivisionError" in caplog.text and answer.headers["x-request-id"] in caplog.text


def test_a_request_beyond_its_time_is_a_504(llm: FakeLLM):
    llm.paused = True
    with Service(llm, default_timeout=0.05) as service, running(service) as site:
        answer = site.complete("hi")
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert "0.05 s" in answer.error["message"]
        (*_, last) = site.complete("hi", stream=True).events
        assert last["error"]["code"] == "timeout"
        assert 'dflash_requests_total{outcome="timeout"} 2.0' in metrics(site)


def test_while_it_drains_open_requests_end_and_new_ones_are_503(
    site: Site, service: Service, llm: FakeLLM
):
    llm.paused = True
    with contextlib.closing(site.open("/v1/completions", prompt="hi", max_tokens=5)) as client:
        until(lambda: bool(llm.waiting))
        assert not service.drain(0.0)
        answer = site.complete("hi")
        assert (answer.status, answer.error["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert (site.get("/ready").status, site.get("/health").status) == (503, 200)
        assert site.get("/ready").document["status"] == "draining"
        llm.paused = False
        assert text("hi", 5).encode() in received(client)


def received(client: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found or not found.endswith(b"}"):
        found += client.recv(65536)
    return found


def test_when_the_engine_fails_open_requests_and_health_say_so(
    site: Site, service: Service, llm: FakeLLM
):
    llm.paused = True
    with contextlib.closing(site.open("/v1/completions", prompt="hi")) as client:
        until(lambda: bool(llm.waiting))
        llm.failure = EngineError("the engine failed 4 times in a row: 0x1234")
        assert b"HTTP/1.1 500" in received(client)
    until(lambda: not service.alive)
    for path in ("/health", "/ready"):
        status = site.get(path)
        assert (status.status, status.document["status"]) == (503, "failed")
        assert b"0x1234" not in status.body
    answer = site.chat()
    assert answer.status == 503 and "must be started again" in answer.error["message"]


def test_a_model_without_a_tokenizer_takes_and_gives_ids_only():
    with Service(FakeLLM()) as service, running(service) as site:
        assert "give token ids" in site.complete("hi").error["message"]
        assert "give token ids" in site.chat().error["message"]
        document = site.complete([5, 6], max_tokens=3, logprobs=0).document
        ids = [str(token) for token in answer_ids([5, 6], 3)]
        assert document["choices"][0]["logprobs"]["tokens"] == ids
        assert document["usage"]["completion_tokens"] == 3


def test_the_metrics_count_requests_and_compiles(site: Site):
    """Fault 105."""
    site.complete("hi", max_tokens=5)
    site.complete("hi", foo=1)
    until(lambda: 'dflash_requests_total{outcome="done"} 1.0' in metrics(site))
    found = metrics(site)
    assert 'dflash_requests_total{outcome="refused"} 1.0' in found
    assert "dflash_compiles_in_service 0.0" in found
    assert "dflash_time_to_first_token_seconds_count 1.0" in found
    assert "dflash_inter_token_latency_seconds_count 4.0" in found
