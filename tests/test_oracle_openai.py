"""The official Python client against a real server process: what its users do must work.

Its own types check the shapes of what comes back.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from server_process import ServerProcess, serving
from serving_http import SOON, Site

pytestmark = pytest.mark.oracle

KEY = "secret"
HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
ON: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    sizes = ("--max-seq-len", 128, "--max-batch-size", 2, "--max-queue", 4)
    folder = tmp_path_factory.mktemp("openai")
    with serving(folder, *sizes, DFLASH_JAX_API_KEY=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_the_model_is_listed_and_found(client: Any):
    (model,) = client.models.list().data
    assert model.id == "target"
    assert client.models.retrieve("target") == model


def test_a_chat_its_stream_and_its_usage_agree(client: Any):
    asked = {"model": "target", "messages": HI, **GREEDY, "extra_body": ON}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(one.choices[0].delta.content for one in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.model_extra["dflash"]["speculation"] == "dflash"


def test_the_clients_own_message_can_be_sent_back(client: Any):
    first = client.chat.completions.create(model="target", messages=HI, **GREEDY)
    messages = [*HI, first.choices[0].message.model_dump(), *HI]
    again = client.chat.completions.create(model="target", messages=messages, **GREEDY)
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_completions_stops_choices_and_seeds(client: Any):
    def create(**options: Any) -> Any:
        return client.completions.create(
            model="target", prompt="hi", extra_body=ON, **(GREEDY | options)
        )

    text = create().choices[0].text
    stopped = create(stop=[text[3:5]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(text[3:5])]
    many = create(n=3, temperature=1.5, seed=5)
    assert [one.index for one in many.choices] == [0, 1, 2]
    assert len({one.text for one in many.choices}) == 3
    assert [one.text for one in create(n=3, temperature=1.5, seed=5).choices] == [
        one.text for one in many.choices
    ]
    prompts = client.completions.create(model="target", prompt=["hi", "ho"], **GREEDY)
    assert len(prompts.choices) == 2


def test_logprobs_in_both_shapes(client: Any):
    chat = client.chat.completions.create(
        model="target", messages=HI, logprobs=True, top_logprobs=3, **GREEDY
    )
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens
    for one in entries:
        assert one.logprob <= one.top_logprobs[0].logprob < 0
        assert len(one.top_logprobs) == 3
    old = client.completions.create(model="target", prompt="hi", logprobs=2, **GREEDY)
    logprobs = old.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == old.usage.completion_tokens
    assert all(value < 0 for value in logprobs.token_logprobs)


def test_errors_are_the_clients_own_exceptions(server: ServerProcess, client: Any):
    import openai

    def create(**options: Any) -> Any:
        asked = {"model": "target", "messages": HI} | options
        return client.chat.completions.create(**asked)

    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        create(model="other")
    with pytest.raises(openai.BadRequestError, match="grammar or a schema") as refused:
        create(response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        create(temperature=-1)
    with pytest.raises(openai.BadRequestError, match="served length of 128") as long:
        create(messages=[{"role": "user", "content": "x" * 200}])
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.address}/v1", api_key="other", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_stream_that_is_left_early_frees_its_slot(server: ServerProcess, client: Any):
    """Fault 66."""
    for _ in range(5):
        stream = client.chat.completions.create(
            model="target", messages=HI, stream=True, max_tokens=100, n=2, extra_body=ON
        )
        next(iter(stream))
        stream.close()
    site, end = Site(server.port), time.monotonic() + SOON
    while True:
        metrics = site.get("/metrics", Authorization=f"Bearer {KEY}").body.decode()
        if "dflash_slots_busy 0.0" in metrics and "dflash_queue_waiting 0.0" in metrics:
            break
        assert time.monotonic() < end, metrics
    assert client.chat.completions.create(model="target", messages=HI, **GREEDY).choices


def test_at_the_end_nothing_was_compiled_and_ctrl_c_ends_the_process(
    server: ServerProcess, client: Any
):
    """Fault 105."""
    site = Site(server.port)
    assert site.get("/health").document["compiles_in_service"] == 0
    server.interrupt()
    assert server.process.wait(SOON) == 0
    log = server.log.read_text()
    assert "no new requests are taken" in log and "Traceback" not in log
