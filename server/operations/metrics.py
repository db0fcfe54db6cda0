"""The metrics at /metrics: the engine's counters as of its latest step, and the server's own.

Names are vLLM's with another prefix, so its dashboards need only that. One registry per app: nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gptserve.engine.errors import DeathKind
from gptserve.engine.process.client import EngineClient
from gptserve.server.api.schemas import BackgroundStatus
from gptserve.server.http.connections import Connections

TIME_TO_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)

_FamilyType = type[GaugeMetricFamily] | type[CounterMetricFamily]
RESTART_KINDS = tuple(kind for kind in DeathKind if kind is not DeathKind.CLOSED)


class Metrics:
    """The metrics of one app, each labelled with the model's name.

    It counts and times what routes report. What others count is read when Prometheus asks, by `collect`.
    """

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._background: Callable[[], Mapping[str, int]] = dict
        self._connections: Connections | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token", "From the request to its first token", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency", "From one token of a choice to its next", INTER_TOKEN_BUCKETS
        )
        self.request_latency = self._histogram(
            "e2e_request_latency", "From the request to the end of its answer", REQUEST_BUCKETS
        )
        self._finished = self._counter("request_success", "Choices that ended, by reason", "finished_reason")
        self._rejections = self._counter(
            "admission_rejections", "Completions refused with status 429 or 503, by error code", "code"
        )

    def count_finished(self, reason: str, number: int) -> None:
        """Count choices that ended by `reason`."""
        self._finished.labels(self._model_name, reason).inc(number)

    def count_rejection(self, code: str) -> None:
        """Count a refused completion."""
        self._rejections.labels(self._model_name, code).inc()

    def watch_background(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Show the number of background completions by status; `counts` returns it."""
        self._background = counts

    def watch_connections(self, connections: Connections) -> None:
        """Show the numbers of open, refused and closed connections."""
        self._connections = connections

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers that the engine, its client, the connections and the store count."""
        engine, stats, connections = self._engine, self._engine.stats, self._connections
        usage = stats.num_used_blocks / engine.info.num_blocks if engine.is_alive else 0.0
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests being computed", stats.num_running),
            ("num_requests_waiting", "Requests in the queue", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use, 1 is all", usage),
        ]
        counters: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Prompt tokens taken in", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.num_generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.num_prefix_queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache", stats.num_prefix_hit_tokens),
            ("num_preemptions", "Sequences that lost their blocks", stats.num_preemptions),
            ("spec_decode_num_draft_tokens", "Tokens guessed and verified", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Guesses that held", stats.num_accepted_tokens),
        ]
        if connections is not None:
            gauges += [
                ("connections", "Open connections", len(connections)),
                ("idle_connections", "Open connections without a request", connections.num_idle),
            ]
            counters += [
                ("connections_refused", "Connections refused because all were busy", connections.num_refused),
                ("connections_closed_idle", "Idle connections closed to make room", connections.num_closed_idle),
            ]
        for stem, text, value in gauges:
            yield self._family(GaugeMetricFamily, stem, text, {(): value})
        for stem, text, total in counters:
            yield self._family(CounterMetricFamily, stem, text, {(): total})
        restarts: dict[tuple[str, ...], float] = {(kind,): engine.restarts.get(kind, 0) for kind in RESTART_KINDS}
        text = "Engines that died and were replaced, by the kind of death"
        yield self._family(CounterMetricFamily, "engine_restarts", text, restarts, "kind")
        counts = self._background()
        kept: dict[tuple[str, ...], float] = {(status,): counts.get(status, 0) for status in get_args(BackgroundStatus)}
        text = "Background and keyed completions"
        yield self._family(GaugeMetricFamily, "kept_completions", text, kept, "status")

    def _family(
        self, family_type: _FamilyType, stem: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        """Return a metric with a value for each tuple of further labels."""
        family = family_type(f"gptserve_{stem}", text, labels=("model_name", *labels))
        for of, value in values.items():
            family.add_metric((self._model_name, *of), value)
        return family

    def _histogram(self, stem: str, text: str, buckets: Sequence[float]) -> Histogram:
        name, label = f"gptserve_{stem}_seconds", ("model_name",)
        return Histogram(name, text, label, registry=self._registry, buckets=buckets).labels(self._model_name)

    def _counter(self, stem: str, text: str, label: str) -> Counter:
        return Counter(f"gptserve_{stem}", text, ("model_name", label), registry=self._registry)
