"""OpenTelemetry traces: a span of each request, below it one of each completion with the phases of its choices.

The only file that imports OpenTelemetry, which `pip install 'gptserve[otel]'` adds; `parts.py` imports it if traces are
asked for. Names are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. The library sends in a
thread of its own; what does not fit its queue is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

import gptserve
from gptserve.server.completions.shapes import TEXT_SHAPE
from gptserve.server.core.logs import RareWarning
from gptserve.server.http.envelope import CLIENT_GONE, PROBES

if TYPE_CHECKING:
    from gptserve.server.completions.plan import CompletionPlan
    from gptserve.server.completions.times import ChoiceTimes, CompletionTimes

FLUSH_LIMIT_S = 3.0  # of the 5 s that a hurried end may take
MAX_ATTRIBUTE = 4096  # characters, those of a prompt in the log
MAX_INTEGER = 2**63 - 1  # of an attribute
MAX_CHOICES = 16  # whose phases are shown: making a span takes the event loop 20 us

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_STRANGERS = "opentelemetry.trace"  # what it warns of is in the headers of requests

logger = logging.getLogger(__name__)


class Tracing:
    """Makes the spans of one server and sends them to the collector at `endpoint`. Call `close` at last."""

    def __init__(self, endpoint: str) -> None:
        log = logging.getLogger("opentelemetry")
        log.handlers, log.propagate = [_RareLog()], False
        resource = Resource({"service.name": "gptserve", "service.version": gptserve.__version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),
            span_limits=SpanLimits(max_attribute_length=MAX_ATTRIBUTE),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("gptserve", gptserve.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left, within FLUSH_LIMIT_S."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)  # it alone may take 30 s
        sending.start()
        sending.join(FLUSH_LIMIT_S)
        if sending.is_alive():
            logger.warning("the last traces are lost: the collector did not take them within %g s", FLUSH_LIMIT_S)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return an application that makes a span of each request to `app` but probes. RequestEnvelope is in `app`."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in PROBES:
                await app(scope, receive, send)
                return
            with self._request(scope):
                await app(scope, receive, send)

        return traced

    @contextmanager
    def _request(self, scope: Scope) -> Iterator[None]:
        """Trace the request handled in the block; what is traced in its context, tasks included, is below it."""
        headers = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT_HEADERS
        }
        method: str = scope["method"]
        with self._tracer.start_as_current_span(
            method,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": method, "url.scheme": scope["scheme"], "url.path": scope["path"]},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            trace_id = format_trace_id(span.get_span_context().trace_id)
            state = scope.setdefault("state", {})
            state["log_fields"] = {"trace_id": trace_id}
            try:
                yield
            finally:
                _end_request(span, method, getattr(scope.get("route"), "path", None), state["log_fields"])

    def add_completion(
        self, plan: CompletionPlan, usage: Mapping[str, Any], times: CompletionTimes, reasons: Sequence[str]
    ) -> None:
        """Trace a completion that has ended now, its choices by `reasons`, below the request that began it."""
        now, now_ns = time.perf_counter(), time.time_ns()

        def unix_ns(seconds: float) -> int:
            return now_ns + round((seconds - now) * 1e9)

        attributes = _request_attributes(plan) | {
            "gen_ai.response.finish_reasons": list(reasons),
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        if first_at := min((choice.first_at for choice in times.choices if choice.first_at is not None), default=None):
            attributes["gen_ai.response.time_to_first_chunk"] = first_at - times.started_at
        name = f"{attributes['gen_ai.operation.name']} {plan.identity.model}"
        span = self._tracer.start_span(name, attributes=attributes, start_time=unix_ns(times.started_at))
        if "error" in reasons:
            span.set_status(StatusCode.ERROR)
        context = set_span_in_context(span)
        for index, choice in enumerate(times.choices[:MAX_CHOICES]):
            for phase, start, end in _phases(choice):
                attribute = {"gptserve.choice.index": index}
                part = self._tracer.start_span(phase, context, attributes=attribute, start_time=unix_ns(start))
                part.end(unix_ns(end))
        span.end(now_ns)


class _RareLog(logging.Handler):
    """Logs what the library warns of once a minute, but for what strangers send."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warning = RareWarning(logger)

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(_STRANGERS):
            self._warning.log(f"traces: {record.getMessage()}")


def _end_request(span: Span, method: str, route: str | None, fields: Mapping[str, Any]) -> None:
    """Say how a request ended, from the fields of its log line."""
    if route is not None:
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
    status = fields["status"] or CLIENT_GONE
    span.set_attribute("http.response.status_code", status)
    span.set_attribute("gptserve.request.id", fields["request_id"])
    for name in ("key", "prompt"):  # the name of a key; a prompt only with --log-prompts
        if name in fields:
            span.set_attribute(f"gptserve.request.{name}", fields[name])
    if "error" in fields:
        span.set_attribute("error.type", fields["error"])
    if status >= 500 or (status < 400 and "error" in fields):  # the convention has no error in what clients do wrong
        span.set_status(StatusCode.ERROR)


def _request_attributes(plan: CompletionPlan) -> dict[str, Any]:
    params = plan.requests[0].params
    return {
        "gen_ai.operation.name": "text_completion" if plan.shape is TEXT_SHAPE else "chat",
        "gen_ai.provider.name": "gptserve",
        "gen_ai.request.model": plan.body.model or plan.identity.model,
        "gen_ai.request.stream": bool(plan.body.stream),
        "gen_ai.request.choice.count": len(plan.requests),
        "gen_ai.request.seed": plan.identity.seed,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": min(params.top_k, MAX_INTEGER),
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.response.id": plan.answer_id,
        "gen_ai.response.model": plan.identity.model,
    }


def _phases(choice: ChoiceTimes) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of the phases that a choice has come to, by time.perf_counter."""
    if choice.first_at is None:
        return
    if choice.waits is not None:
        queue_s, prefill_s = choice.waits
        running_at = choice.first_at - prefill_s
        yield "queue", running_at - queue_s, running_at
        yield "prefill", running_at, choice.first_at
    yield "decode", choice.first_at, choice.latest_at
