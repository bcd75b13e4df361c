"""What a server measures, for Prometheus: times of requests, and the engine's own counts.

Times are observed here as updates arrive; everything else is read from the service when somebody
asks, so nothing is counted twice. Each `Metrics` has its own registry: nothing is global.
"""

from collections.abc import Iterator
from typing import Any

import jax
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_jax.serving.counters import Load
from dflash_jax.serving.job import Job, Update
from dflash_jax.serving.service import Service

# Seconds; a token takes milliseconds on a GPU and up to a second on a CPU.
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)

OUTCOMES = ("done", "cancelled", "timeout", "failed", "refused", "overloaded", "unavailable")


class Metrics:
    """The metrics of one service.

    Args:
        model: the name that it is served under.
    """

    def __init__(self, service: Service, model: str):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCounts(service, model))
        self.first_token = Histogram(
            "dflash_time_to_first_token_seconds",
            "From the arrival of a request to its first token, for each answer.",
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self.token = Histogram(
            "dflash_inter_token_latency_seconds",
            "Time per token after the first; the tokens of one round share its time.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.request = Histogram(
            "dflash_request_seconds",
            "From the arrival of a request to its last token.",
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._requests = Counter(
            "dflash_requests",
            "Requests by outcome; refused: wrong or not authorised, overloaded: the queue was "
            "full, unavailable: draining or failed.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)

    def count(self, outcome: str) -> None:
        """One more request that ended so."""
        self._requests.labels(outcome).inc()

    def finish(self, job: Job) -> None:
        """A request that the engine had taken has ended."""
        if job.outcome is not None:
            self.count(job.outcome)
        if job.outcome == "done" and job.seconds is not None:
            self.request.observe(job.seconds)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class Timer:
    """Observes the answers of one request as their updates arrive."""

    def __init__(self, metrics: Metrics, submitted: float):
        self._metrics, self._submitted = metrics, submitted
        self._latest: dict[int, float] = {}

    def observe(self, update: Update) -> None:
        """Takes in what one step made final; pieces without tokens tell nothing."""
        tokens = len(update.piece.token_ids)
        if not tokens:
            return
        before = self._latest.get(update.choice)
        self._latest[update.choice] = update.at
        if before is None:
            self._metrics.first_token.observe(update.at - self._submitted)
            return
        for _ in range(tokens):
            self._metrics.token.observe((update.at - before) / tokens)


class _EngineCounts(Collector):
    """Reads the service at each scrape."""

    def __init__(self, service: Service, model: str):
        self._service, self._model = service, model

    def collect(self) -> Iterator[Metric]:
        """The engine's counts as they are now."""
        load, llm = self._service.load, self._service.llm
        yield InfoMetricFamily(
            "dflash",
            "What is served and how it is decoded.",
            value={
                "model": self._model,
                "speculation": llm.config.speculation,
                "max_draft_len": str(llm.config.max_draft_len),
            },
        )
        yield GaugeMetricFamily(
            "dflash_ready", "1 while requests are taken.", value=float(self._service.ready)
        )
        yield from _gauges(load)
        yield from _counts(load)
        yield GaugeMetricFamily(
            "dflash_compiles_in_service",
            "Compilations since the engine was ready; anything but 0 is a fault.",
            value=llm.compiles_in_service,
        )
        yield from _device_memory()


def _gauges(load: Load) -> Iterator[Metric]:
    busy = load.slots - load.free_slots
    for name, about, value in (
        ("queue_waiting", "Answers that wait for a slot.", load.waiting),
        ("prefilling", "Answers whose prompt is being computed.", load.prefilling),
        ("decoding", "Answers that decode.", load.decoding),
        ("slots_busy", "Slots that an answer holds.", busy),
        ("slots_total", "Slots.", load.slots),
        (
            "acceptance_length",
            "Tokens committed by a round, bonus included: round_tokens over rounds.",
            (load.rounds + load.accepted) / load.rounds if load.rounds else 0.0,
        ),
    ):
        yield GaugeMetricFamily(f"dflash_{name}", about, value=value)


def _counts(load: Load) -> Iterator[Metric]:
    for name, about, value in (
        ("rounds", "Rounds of rows.", load.rounds),
        ("rounds_drafting", "Rounds that verified drafts.", load.rounds_drafting),
        (
            "round_tokens",
            "Tokens committed by rounds, bonus included.",
            load.rounds + load.accepted,
        ),
        ("drafts", "Drafts that were verified.", load.drafts),
        ("prefill_tokens", "Tokens of prompts that were computed.", load.prefill_tokens),
        ("prefix_hits", "Prompts that took over a prefix.", load.prefix_hits),
        ("prefix_tokens", "Tokens of prompts that were not computed again.", load.prefix_tokens),
        ("recoveries", "Times that the arenas were lost and made anew.", load.recoveries),
    ):
        yield CounterMetricFamily(f"dflash_{name}", about, value=value)
    accepted = CounterMetricFamily(
        "dflash_accepted_drafts",
        "Drafts that the target agreed with, by their place in the round.",
        labels=["position"],
    )
    for place, count in enumerate(load.accepted_at, 1):
        accepted.add_metric([str(place)], count)
    yield accepted


def _device_memory() -> Iterator[Metric]:
    memory = GaugeMetricFamily(
        "dflash_device_memory_bytes",
        "Of each device that tells: in use, at its highest, and what XLA may take.",
        labels=["device", "kind"],
    )
    for device in jax.local_devices():
        stats: dict[str, Any] = device.memory_stats() or {}
        for kind in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"):
            if kind in stats:
                memory.add_metric([str(device.id), kind], stats[kind])
    if memory.samples:
        yield memory
