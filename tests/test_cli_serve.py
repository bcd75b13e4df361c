"""`serve`: what it refuses before loading, what it serves, and what Ctrl-C does.

A scripted engine stands in for the model (`fake_llm.py`); the process itself with a real one is
what `test_oracle_openai.py` starts.
"""

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from command_line import Ran, run
from dflash_jax.cli import serve as command
from fake_llm import FakeLLM
from serving_http import SOON, Site


class Started:
    """What `start_llm` was asked for, and the engine that it gave."""

    def __init__(self) -> None:
        self.llm = FakeLLM(served=100_000)
        self.asked: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, target: str, drafter: str | None, bars: Any, **options: Any) -> FakeLLM:
        self.asked, self.options = (target, drafter), options
        return self.llm


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(command, "start_llm", started)
    return started


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def while_serving(
    port: int, visit: Callable[[Site], object], *words: object, interrupts: bool = False
) -> Ran:
    """Runs the command here, where signals arrive, and the visit in a thread.

    Ctrl-C ends it after the visit, unless the visit `interrupts` itself: one that comes when the
    command has ended would interrupt the tests.
    """
    failures: list[BaseException] = []

    def visitor() -> None:
        try:
            _wait_for(port)
            visit(Site(port))
        except BaseException as error:
            failures.append(error)
        if failures or not interrupts:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=visitor)
    thread.start()
    ran = run("serve", *words, "--port", port)
    thread.join(SOON)
    if failures:
        raise failures[0]
    return ran


def _wait_for(port: int) -> None:
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.01)
    raise TimeoutError("the server does not listen")


def test_it_says_where_it_listens_serves_and_ends_with_0(started: Started, port: int):
    answers: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    ran = while_serving(port, lambda site: answers.append(site.complete([5, 6])), "owner/model")
    assert (ran.code, ran.stdout) == (0, "")
    assert f"listening on http://127.0.0.1:{port} (Ctrl-C ends)" in ran.stderr
    assert answers[0].status == 200 and answers[0].document["model"] == "owner/model"
    assert signal.getsignal(signal.SIGINT) is before
    assert started.asked == ("owner/model", None)


def test_ctrl_c_lets_open_requests_end_and_refuses_new_ones(started: Started, port: int):
    seen: list[Any] = []

    def visit(site: Site) -> None:
        started.llm.paused = True
        with site.open("/v1/completions", prompt=[5], max_tokens=9) as client:
            _until(lambda: bool(started.llm.waiting))
            os.kill(os.getpid(), signal.SIGINT)
            _until(lambda: site.get("/ready").status == 503)
            seen.append(site.complete([5]).status)
            started.llm.paused = False
            seen.append(client.recv(65536)[:15])

    ran = while_serving(port, visit, "m", interrupts=True)
    assert seen == [503, b"HTTP/1.1 200 OK"]
    assert ran.code == 0 and "waiting for the open ones" in ran.stderr


def test_a_second_ctrl_c_ends_the_open_requests(started: Started, port: int):
    seen: list[bytes] = []

    def visit(site: Site) -> None:
        started.llm.paused = True
        with site.open("/v1/completions", prompt=[5], max_tokens=9) as client:
            _until(lambda: bool(started.llm.waiting))
            os.kill(os.getpid(), signal.SIGINT)
            _until(lambda: site.get("/ready").status == 503)
            os.kill(os.getpid(), signal.SIGINT)
            seen.append(client.recv(65536)[:12])

    ran = while_serving(port, visit, "m", interrupts=True)
    assert seen == [b"HTTP/1.1 503"]
    assert ran.code == 0 and "ending the open requests" in ran.stderr


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_options_reach_the_engine_and_the_service(started: Started, port: int):
    words = "--max-seq-len 77 --max-batch-size 3 --max-num-tokens 99 --max-draft-len 2 "
    words += "--speculation suffix --adaptive --rounds-per-step 4 --no-prefix-reuse "
    words += "--allow-token-limited --allow-unqualified -d drafter --kv-layout paged "
    words += "--context-store pool --page-size 16 --kv-memory-fraction 0.5 --kv-max-tokens 640 "
    words += "--kv-max-bytes 4096 --device-memory 8GiB --headroom seed --dtype bfloat16 "
    words += "--attention xla --draft-attention pallas"
    answers: list[Any] = []

    def visit(site: Site) -> None:
        answers.append(site.get("/v1/models").status)
        answers.append(site.complete([5], n=3).status)

    key = ("--api-key", "secret", "--max-queue", 0)
    while_serving(port, visit, "m", *words.split(), *key)
    assert started.asked == ("m", "drafter")
    assert started.options == {
        "max_seq_len": 77,
        "max_batch_size": 3,
        "max_num_tokens": 99,
        "max_draft_len": 2,
        "speculation": "suffix",
        "adaptive": True,
        "rounds_per_step": 4,
        "prefix_reuse": False,
        "allow_token_limited": True,
        "allow_unqualified": True,
        "kv_layout": "paged",
        "context_store": "pool",
        "page_size": 16,
        "kv_memory_fraction": 0.5,
        "kv_max_tokens": 640,
        "kv_max_bytes": 4096,
        "device_memory": "8GiB",
        "headroom": "seed",
        "dtype": "bfloat16",
        "attention": "xla",
        "draft_attention": "pallas",
    }
    left_out = {field.name for field in dataclasses.fields(dj.ServeConfig)} - set(started.options)
    only_in_python = {"mesh", "rope_scaling", "allocation_order", "skip_context_budget_check"}
    assert left_out == only_in_python
    assert answers == [401, 401]


def test_options_that_were_not_given_are_left_to_the_library(started: Started, port: int):
    while_serving(port, lambda site: None, "m")
    assert set(started.options.values()) == {None}


def test_the_key_comes_from_the_environment_too(
    started: Started, port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DFLASH_JAX_API_KEY", "secret")
    statuses: list[int] = []

    def visit(site: Site) -> None:
        statuses.append(site.get("/v1/models").status)
        statuses.append(site.get("/v1/models", Authorization="Bearer secret").status)

    while_serving(port, visit, "m")
    assert statuses == [401, 200]


@pytest.mark.parametrize(
    "words, drafter",
    [
        (("demo",), "demo"),
        (("demo", "--speculation", "dflash"), "demo"),
        (("demo", "--speculation", "none"), None),
        (("demo", "--speculation", "suffix"), None),
        (("demo", "-d", "other"), "other"),
        (("owner/model",), None),
    ],
)
def test_only_the_demo_target_brings_its_drafter(
    words: tuple[str, ...], drafter: str | None, started: Started, port: int
):
    while_serving(port, lambda site: None, *words)
    assert started.asked == (words[0], drafter)


def test_a_folder_is_served_under_its_name(started: Started, port: int, tmp_path: Path):
    names: list[str] = []
    while_serving(port, lambda site: names.append(site.get("/health").document["model"]), tmp_path)
    assert names == [tmp_path.name]


def test_an_open_address_without_a_key_is_warned_of(started: Started, port: int):
    assert "warning" not in while_serving(port, lambda site: None, "m").stderr
    ran = while_serving(port, lambda site: None, "m", "--host", "0.0.0.0")
    assert "warning: 0.0.0.0 can be reached from other machines" in ran.stderr
    ran = while_serving(port, lambda site: None, "m", "--host", "0.0.0.0", "--api-key", "k")
    assert "warning" not in ran.stderr


def test_a_taken_port_is_said_before_anything_is_loaded(started: Started):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ran = run("serve", "m", "--port", port)
    assert ran.code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in ran.stderr and "--port" in ran.stderr
    assert started.asked == ()


@pytest.mark.parametrize(
    "words, said",
    [
        (("--api-key", ""), "the API key is empty"),
        (("--request-timeout", "0"), "request_timeout=0"),
        (("--request-timeout", "nan"), "request_timeout=nan"),
        (("--max-queue", "-1"), "max-queue"),
        (("--port", "70000"), "port"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    words: tuple[str, ...], said: str, started: Started
):
    ran = run("serve", "m", *words)
    assert ran.code == 2 and said in ran.stderr
    assert started.asked == ()


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "prometheus_client"])
def test_without_the_extra_the_error_names_the_line_that_installs_it(
    missing: str, started: Started, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, missing, None)
    ran = run("serve", "m")
    assert (ran.code, started.asked) == (2, ())
    assert f'{missing} is not installed, which serving needs: pip install "dflash-jax[serve]"' in (
        ran.stderr
    )


def test_the_log_has_times_and_tracebacks_while_it_serves(started: Started, port: int):
    started.llm.failure = ValueError("boom")
    ran = while_serving(port, lambda site: site.complete([5]), "m")
    assert "the engine failed: every open request ends with an error" in ran.stderr
    assert "ValueError: boom" in ran.stderr and "Traceback" in ran.stderr
    assert logging.getLogger("uvicorn").handlers == []
