"""The metrics at /metrics: the engine's counters as of its latest step, and the server's own.

Names are vLLM's with another prefix, so its dashboards need only that. One registry per app: nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gptserve.engine.errors import DeathKind
from gptserve.engine.process.client import EngineClient
from gptserve.server.api.schemas import BackgroundStatus
from gptserve.server.http.connections import Connections

TIME_TO_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)

RESTART_KINDS = tuple(kind for kind in DeathKind if kind is not DeathKind.CLOSED)


class Metrics:
    """The metrics of one app, each labelled with the model's name."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        ProcessCollector(registry=self._registry)
        label = ("model_name",)
        self.time_to_first_token = Histogram(
            "gptserve_time_to_first_token_seconds",
            "From the request to its first token",
            label,
            registry=self._registry,
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
        ).labels(model_name)
        self.inter_token_latency = Histogram(
            "gptserve_inter_token_latency_seconds",
            "From one token of a choice to its next",
            label,
            registry=self._registry,
            buckets=INTER_TOKEN_BUCKETS,
        ).labels(model_name)
        self.request_latency = Histogram(
            "gptserve_e2e_request_latency_seconds",
            "From the request to the end of its answer",
            label,
            registry=self._registry,
            buckets=REQUEST_BUCKETS,
        ).labels(model_name)
        self._model_name = model_name
        self._finished = Counter(
            "gptserve_request_success",
            "Choices that ended, by reason",
            (*label, "finished_reason"),
            registry=self._registry,
        )
        self._rejections = Counter(
            "gptserve_admission_rejections",
            "Completions refused with status 429 or 503, by error code",
            (*label, "code"),
            registry=self._registry,
        )

    def count_finished(self, reason: str, number: int) -> None:
        """Count choices that ended by `reason`."""
        self._finished.labels(self._model_name, reason).inc(number)

    def count_rejection(self, code: str) -> None:
        """Count a refused completion."""
        self._rejections.labels(self._model_name, code).inc()

    def watch_background(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Show the number of background completions by status; `counts` returns it."""
        self._registry.register(_BackgroundCollector(counts, self._model_name))

    def watch_connections(self, connections: Connections) -> None:
        """Show the numbers of open, refused and closed connections."""
        self._registry.register(_ConnectionCollector(connections, self._model_name))

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not ask an engine that has not started

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        num_blocks = self._engine.info.num_blocks if self._engine.is_alive else 0
        usage = stats.num_used_blocks / num_blocks if num_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests being computed", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 1 is all", usage)
        yield self._counter("prompt_tokens", "Prompt tokens taken in", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.num_generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up", stats.num_prefix_queried_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache", stats.num_prefix_hit_tokens)
        yield self._counter("num_preemptions", "Sequences that lost their blocks", stats.num_preemptions)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens guessed and verified", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Guesses that held", stats.num_accepted_tokens)
        yield self._restarts()

    def _restarts(self) -> Metric:
        text, labels = "Engines that died and were replaced, by the kind of death", ("model_name", "kind")
        family = CounterMetricFamily("gptserve_engine_restarts", text, labels=labels)
        for kind in RESTART_KINDS:
            family.add_metric((self._model_name, kind), self._engine.restarts.get(kind, 0))
        return family

    def _gauge(self, stem: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"gptserve_{stem}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, stem: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"gptserve_{stem}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family


class _BackgroundCollector(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, int]], model_name: str) -> None:
        self._counts = counts
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "gptserve_kept_completions", "Background and keyed completions", labels=("model_name", "status")
        )
        counts = self._counts()
        for status in get_args(BackgroundStatus):
            family.add_metric((self._model_name, status), counts.get(status, 0))
        yield family


class _ConnectionCollector(Collector):
    def __init__(self, connections: Connections, model_name: str) -> None:
        self._connections = connections
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        connections, label = self._connections, ("model_name",)
        for stem, text, value in (
            ("connections", "Open connections", len(connections)),
            ("idle_connections", "Open connections without a request", connections.num_idle),
        ):
            gauge = GaugeMetricFamily(f"gptserve_{stem}", text, labels=label)
            gauge.add_metric((self._model_name,), value)
            yield gauge
        for stem, text, value in (
            ("connections_refused", "Connections refused because all were busy", connections.num_refused),
            ("connections_closed_idle", "Idle connections closed to make room", connections.num_closed_idle),
        ):
            counter = CounterMetricFamily(f"gptserve_{stem}", text, labels=label)
            counter.add_metric((self._model_name,), value)
            yield counter
