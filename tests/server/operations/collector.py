"""A stand-in for an OpenTelemetry collector: takes OTLP over HTTP and keeps the spans, decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it came, ids in hexadecimal digits. status is 2 for an error, kind 2 for a server's."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    start: int
    end: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    """`gate` holds its answers unless it is set; `resource` are the attributes of the latest sender."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)

    def named(self, name: str) -> Span:
        """Return the one span of this name."""
        [span] = [span for span in self.spans if span.name == name]
        return span

    def below(self, span: Span) -> list[Span]:
        """Return the children of a span, in the order of their start."""
        return sorted((child for child in self.spans if child.parent_id == span.span_id), key=lambda child: child.start)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for sender in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = decoded(sender.resource.attributes)
            for scope in sender.scope_spans:
                self.spans += map(span_of, scope.spans)


@contextmanager
def serve_collector() -> Iterator[Collector]:
    collector = Collector()
    collector.gate.set()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            collector.gate.wait()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has gone
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def span_of(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.status.code,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        decoded(span.attributes),
    )


def decoded(attributes: Any) -> dict[str, Any]:
    return {attribute.key: plain(attribute.value) for attribute in attributes}


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(part) for part in value.array_value.values] if kind == "array_value" else getattr(value, kind)
