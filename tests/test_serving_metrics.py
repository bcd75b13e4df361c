"""What Prometheus reads: times as they were, counts as the engine has them, nothing global."""

import threading
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.serving.job import Job, Update
from dflash_jax.serving.metrics import OUTCOMES, Metrics, Timer
from dflash_jax.serving.output import Piece
from dflash_jax.serving.request import SamplingParams
from dflash_jax.serving.service import Service
from fake_llm import FakeLLM

SOON = 10.0


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(slots=2)


@pytest.fixture
def service(llm: FakeLLM) -> Iterator[Service]:
    with Service(llm) as service:
        yield service


def samples(metrics: Metrics) -> dict[str, float]:
    """Each sample by its name and labels, as Prometheus itself parses them."""
    return {
        sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())): value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        for value in [sample.value]
    }


def update(at: float, tokens: int, choice: int = 0) -> Update:
    return Update(choice, Piece("", [65] * tokens, None, None), [], at)


def test_times_are_those_of_the_updates(service: Service):
    metrics = Metrics(service, "m")
    timer = Timer(metrics, 100.0)
    for one in (update(100.5, 1), update(101.5, 4), update(102.5, 0), update(103.5, 2)):
        timer.observe(one)
    timer.observe(update(104.0, 1, choice=1))
    found = samples(metrics)
    assert found["dflash_time_to_first_token_seconds_count"] == 2
    assert found["dflash_time_to_first_token_seconds_sum"] == pytest.approx(0.5 + 4.0)
    # Six tokens after the first: four in one second, two in the next two.
    assert found["dflash_inter_token_latency_seconds_count"] == 6
    assert found["dflash_inter_token_latency_seconds_sum"] == pytest.approx(3.0)


def test_the_acceptance_length_is_the_ratio_of_its_two_counters(service: Service):
    metrics = Metrics(service, "m")
    job = service.submit([5, 6], SamplingParams(max_tokens=9), lambda update: None)
    job.completion(SOON)
    assert service.drain(SOON)
    found = samples(metrics)
    assert found["dflash_rounds_total"] == 4
    assert found["dflash_round_tokens_total"] == 4 + 0 + 1 + 2 + 3
    assert found["dflash_acceptance_length"] == pytest.approx(10 / 4)
    by_place = [found[f"dflash_accepted_drafts_total {place}"] for place in (1, 2, 3)]
    assert by_place == [3, 2, 1]
    assert found["dflash_drafts_total"] == 12


def test_the_queue_and_the_slots_are_as_they_are_now(llm: FakeLLM, service: Service):
    metrics = Metrics(service, "m")
    llm.paused = True
    for _ in range(3):
        service.submit([5, 6], SamplingParams(max_tokens=9), lambda update: None)
    found = samples(metrics)
    assert (found["dflash_queue_waiting"], found["dflash_slots_total"]) == (3, 2)
    llm.paused = False
    assert service.drain(SOON)
    assert samples(metrics)["dflash_ready"] == 0


def test_compiles_in_service_are_shown(llm: FakeLLM, service: Service):
    """Fault 105."""
    metrics = Metrics(service, "m")
    assert samples(metrics)["dflash_compiles_in_service"] == 0
    llm.compiles_in_service = 2
    assert samples(metrics)["dflash_compiles_in_service"] == 2


def test_how_the_server_decodes_is_a_metric(service: Service):
    """Fault 93."""
    text = Metrics(service, "m").text().decode()
    assert 'dflash_info{max_draft_len="3",model="m",speculation="dflash"} 1.0' in text


def test_requests_are_counted_by_how_they_ended(service: Service):
    metrics = Metrics(service, "m")
    assert all(samples(metrics)[f"dflash_requests_total {name}"] == 0 for name in OUTCOMES)
    job = service.submit([5, 6], SamplingParams(max_tokens=9), lambda update: None)
    done = threading.Event()

    def finish(job: Job) -> None:
        metrics.finish(job)
        done.set()

    job.finished.add_done_callback(lambda _: finish(job))
    assert done.wait(SOON)
    metrics.count("overloaded")
    found = samples(metrics)
    assert (found["dflash_requests_total done"], found["dflash_requests_total overloaded"]) == (
        1,
        1,
    )
    assert found["dflash_request_seconds_count"] == 1
    assert found["dflash_request_seconds_sum"] == pytest.approx(job.seconds)


def test_memory_is_shown_where_a_device_tells_it(service: Service, monkeypatch: pytest.MonkeyPatch):
    class Device:
        id = 3

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": 7, "bytes_limit": 11, "largest_alloc_size": 5}

    metrics = Metrics(service, "m")
    assert not any("device_memory" in name for name in samples(metrics))  # a CPU tells nothing
    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    found = {name: v for name, v in samples(metrics).items() if "device_memory" in name}
    assert found == {
        "dflash_device_memory_bytes 3 bytes_in_use": 7,
        "dflash_device_memory_bytes 3 bytes_limit": 11,
    }


def test_two_servers_in_one_process_share_nothing(service: Service):
    first, second = Metrics(service, "m"), Metrics(service, "m")
    first.count("done")
    assert samples(second)["dflash_requests_total done"] == 0
    names = [one.name for one in prometheus_client.REGISTRY.collect()]
    assert not any(name.startswith("dflash") for name in names)
