"""The metrics at /metrics: the engine's counters as of its latest step, and the server's own.

Names are vLLM's with another prefix, so its dashboards need only that; `vllm_metrics.py` has vLLM's own. One registry
per app: nothing is global.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gptserve.engine.errors import DeathKind
from gptserve.engine.process.client import EngineClient
from gptserve.engine.request import FinishReason
from gptserve.engine.stats import STEP_TOKENS_BUCKETS, EngineStats
from gptserve.server.core.background_status import BATCH_STATUSES, BackgroundStatus
from gptserve.server.core.error_responses import codes_of, status_of, to_service_error
from gptserve.server.core.vllm_metrics import vllm_families

# From a small model on a GPU to a large one on a CPU, where a long prompt takes minutes.
_REQUEST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKEN_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DELAY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_NUM_TOKENS_BUCKETS = tuple(first * 10**power for power in range(6) for first in (1, 2, 5))

MetricsPrefix = Literal["gptserve", "vllm"]
RESTART_KINDS = tuple(kind for kind in DeathKind if kind is not DeathKind.CLOSED)
# A choice that waited too long to be admitted counts as an error.
_FINISH_REASONS = tuple(reason.value for reason in FinishReason if reason is not FinishReason.QUEUE_TIMEOUT)
NO_ROUTE = "none"


class OpenConnections(Protocol):
    """Counts the connections of a server."""

    limit: int
    num_refused: int
    num_closed_idle: int

    def __len__(self) -> int:
        """How many are open."""

    @property
    def num_idle(self) -> int:
        """How many of them have no request."""


class _Collected(Collector):
    """Metrics that are collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        return iter(self._families)


class Metrics:
    """The metrics of one app, each labelled with the model's name.

    It counts and times what routes report. What others count is read when Prometheus asks, by `collect`, from the
    functions and the connections that `create_app` and `serve.py` set. Counters with labels have all their values from
    the start, so that a first increase is one.
    """

    def __init__(self, engine: EngineClient, model_name: str, prefix: MetricsPrefix = "gptserve") -> None:
        self._engine = engine
        self._model_name = model_name
        self._methods = {"HEAD"}  # those with a label of their own, which routes add to
        self._expected: set[tuple[str, str, str]] = set()  # hundreds, which get their counters when Prometheus asks
        self._has_vllm_names = prefix == "vllm"
        self.connections: OpenConnections | None = None
        self.background_counts: Callable[[], Mapping[str, int]] = dict
        """Returns the number of background completions by status."""
        self.batch_counts: Callable[[], Mapping[str, int]] = dict
        """Returns the number of batches by status."""
        self.line_counts: Callable[[], Mapping[str, int]] = dict
        """Returns the number of the batches' lines that have ended, by how."""
        self.file_totals: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns how many files are kept, and their bytes."""
        self.journal_bytes: Callable[[], int] = int
        """Returns the size of the journal."""
        self.num_planned: Callable[[], int] = int
        """Returns how many requests are being planned; they count as waiting, too."""
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        ProcessCollector("gptserve_engine", self._engine_process_id, registry=self._registry)
        self._add_times()
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice that ended", _NUM_TOKENS_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a choice that ended", _NUM_TOKENS_BUCKETS
        )
        self._finished = self._counter("request_success", "Choices that ended, by reason", "finished_reason")
        self._rejections = self._counter(
            "admission_rejections", "Completions refused with status 429 or 503, by error code", "code"
        )
        self._http = self._counter("http_requests", "Requests answered", "method", "handler", "status")
        for reason in _FINISH_REASONS:
            self._finished.labels(model_name, reason)
        for code in codes_of(429, 503):
            self._rejections.labels(model_name, code)

    def count_ended(self, reason: str, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Count a choice that ended by `reason`."""
        self._finished.labels(self._model_name, reason).inc()
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_generated_tokens)

    def count_rejection(self, error: Exception) -> None:
        """Count a completion that an error refuses, if it is one of status 429 or 503."""
        told = to_service_error(error)
        if status_of(told) in (429, 503):
            self._rejections.labels(self._model_name, told.code).inc()

    def count_answer(self, method: str, route: str, status: int) -> None:
        """Count an answer; `route` is a template, or NO_ROUTE."""
        known = method if method in self._methods else "other"
        self._http.labels(self._model_name, known, route, str(status)).inc()

    def expect_answers(self, method: str, route: str, statuses: Iterable[int | str]) -> None:
        """Show answers that may come as 0 until the first comes."""
        self._methods.add(method)
        self._expected.update((method, route, str(status)) for status in statuses)

    @property
    def max_connections(self) -> int:
        """How many connections may be open."""
        return sys.maxsize if self.connections is None else self.connections.limit

    @property
    def num_waiting(self) -> int:
        """How many requests are being planned or wait in the engine's queue."""
        return self._engine.stats.num_waiting + self.num_planned()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        families = list(self._registry.collect())  # so that a metric has one value, whatever its name
        return generate_latest(_Collected([*families, *(vllm_families(families) if self._has_vllm_names else ())]))

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers that the engine, its client, the connections and the store count."""
        for answer in self._expected:
            self._http.labels(self._model_name, *answer)
        engine, stats, connections = self._engine, self._engine.stats, self.connections
        usage = stats.num_used_blocks / engine.info.num_blocks if engine.is_alive else 0.0
        num_files, files_bytes = self.file_totals()
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests being computed", stats.num_running),
            ("num_requests_waiting", "Requests being planned or in the queue", self.num_waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use, 1 is all", usage),
            ("journal_bytes", "Size of the journal's files", self.journal_bytes()),
            ("files", "Files kept", num_files),
            ("files_bytes", "Size of the files kept, and of those that arrive", files_bytes),
        ]
        counters = _engine_counters(stats)
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
        yield self._step_tokens(stats)
        text = "Engines that died and were replaced, by the kind of death"
        yield self._by_label(CounterMetricFamily, "engine_restarts", text, "kind", RESTART_KINDS, engine.restarts)
        text, statuses = "Background and keyed completions", get_args(BackgroundStatus)
        yield self._by_label(GaugeMetricFamily, "kept_completions", text, "status", statuses, self.background_counts())
        yield self._by_label(GaugeMetricFamily, "batches", "Batches", "status", BATCH_STATUSES, self.batch_counts())
        text, results = "Lines of batches that ended", ("completed", "failed")
        yield self._by_label(CounterMetricFamily, "batch_lines", text, "result", results, self.line_counts())
        if engine.is_alive:
            yield from self._infos()

    def _add_times(self) -> None:
        def seconds(stem: str, text: str, buckets: Sequence[float] = _REQUEST_BUCKETS) -> Histogram:
            return self._histogram(f"{stem}_seconds", text, buckets)

        self.time_to_first_token = seconds("time_to_first_token", "From the request to its first token")
        text = "From one token of a choice to its next"
        self.inter_token_latency = seconds("inter_token_latency", text, _TOKEN_TIME_BUCKETS)
        self.request_latency = seconds("e2e_request_latency", "From the request to the end of its answer")
        self.queue_time = seconds("request_queue_time", "Wait of a choice for a running slot")
        self.prefill_time = seconds("request_prefill_time", "From the running slot of a choice to its first token")
        self.decode_time = seconds("request_decode_time", "From the first token of a choice to its last")
        self.inference_time = seconds("request_inference_time", "From the running slot of a choice to its last token")
        self.event_loop_lag = seconds("event_loop_lag", "Lag of the event loop: how late it wakes up", _DELAY_BUCKETS)
        self.journal_write_time = seconds("journal_write", "Transactions of the journal", _DELAY_BUCKETS)

    def _infos(self) -> Iterator[Metric]:
        """Yield what the engine and this build are, as labels of the value 1."""
        info = self._engine.info
        cache: dict[str, object] = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,  # vLLM's label, which its dashboards read; on a CPU, too
            "cache_dtype": info.kv_cache_dtype,
            "kv_cache_bytes": info.kv_cache_bytes,
        }
        build: dict[str, object] = {
            "version": version("gptserve"),
            "torch_version": version("torch"),
            "python_version": platform.python_version(),
            "device": info.device,
            "dtype": info.dtype,
            "attention_backend": info.attention_backend,
            "product": info.product,
            "fingerprint": info.fingerprint,
        }
        for stem, text, labels in (
            ("cache_config_info", "The KV cache", cache),
            ("build_info", "Versions, kernels and the fingerprint of the model", build),
        ):
            values = {tuple(map(str, labels.values())): 1.0}
            yield self._family(GaugeMetricFamily, stem, text, values, *labels)

    def _step_tokens(self, stats: EngineStats) -> Metric:
        text = "Tokens computed in a step"
        family = HistogramMetricFamily("gptserve_iteration_tokens_total", text, labels=("model_name",))
        bounds = (*map(float, STEP_TOKENS_BUCKETS), "+Inf")
        buckets = list(zip(map(str, bounds), accumulate(stats.num_steps_by_tokens), strict=True))
        family.add_metric((self._model_name,), buckets, stats.num_computed_tokens)
        return family

    def _engine_process_id(self) -> int | str:
        return self._engine.info.process_id if self._engine.is_alive else "no process"

    def _family(
        self,
        family_type: type[GaugeMetricFamily | CounterMetricFamily],
        stem: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        *labels: str,
    ) -> Metric:
        """Return a metric with a value for each tuple of further labels."""
        family = family_type(f"gptserve_{stem}", text, labels=("model_name", *labels))
        for of, value in values.items():
            family.add_metric((self._model_name, *of), value)
        return family

    def _by_label(
        self,
        family_type: type[GaugeMetricFamily | CounterMetricFamily],
        stem: str,
        text: str,
        label: str,
        values: Iterable[str],
        counts: Mapping[Any, float],
    ) -> Metric:
        """Return a metric with a count for each value of a label, 0 where there is none."""
        return self._family(family_type, stem, text, {(value,): counts.get(value, 0) for value in values}, label)

    def _histogram(self, stem: str, text: str, buckets: Sequence[float]) -> Histogram:
        name, label = f"gptserve_{stem}", ("model_name",)
        return Histogram(name, text, label, registry=self._registry, buckets=buckets).labels(self._model_name)

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        return Counter(f"gptserve_{stem}", text, ("model_name", *labels), registry=self._registry)


def _engine_counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Prompt tokens taken in", stats.num_prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.num_generated_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up", stats.num_prefix_queried_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the cache", stats.num_prefix_hit_tokens),
        ("num_preemptions", "Sequences that lost their blocks", stats.num_preemptions),
        ("spec_decode_num_draft_tokens", "Draft tokens proposed and verified", stats.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.num_accepted_tokens),
    ]
