"""Traces as a collector gets them, decoded: of an application over a fake engine, and of a serving process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

import gptserve
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.server.operations.tracing import MAX_CHOICES, Tracing
from tests.server.conftest import MODEL, Api, LiveServer
from tests.server.fake_engine import FakeEngineClient, say
from tests.server.operations.collector import Collector, Span, serve_collector
from tests.server.serving import Process

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serve_collector() as collector:
        yield collector


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    """Close it to have the spans in the collector."""
    tracing = Tracing(collector.url)
    yield tracing
    tracing.close()
    log = logging.getLogger("opentelemetry")
    log.handlers, log.propagate = [], True


@pytest.fixture
def api(make_api: Callable[..., Api], tracing: Tracing) -> Api:
    return make_api(FakeEngineClient(waiting), tracing=tracing)


def waiting(request: Request) -> Iterator[TokenOutput]:
    """Reply with a first token after half a second in the queue and a quarter in prefill."""
    first, *others = list(zip(say("abc")(request), range(request.params.max_tokens), strict=False))
    yield replace(first[0], waits=(0.5, 0.25))
    yield from (output for output, _ in others)


def completion_of(collector: Collector, request: Span) -> Span:
    [completion] = collector.below(request)
    assert completion.trace_id == request.trace_id
    return completion


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_completion_and_the_phases_of_that_below_it(
    api: Api, tracing: Tracing, collector: Collector, stream: bool
) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stream": stream}
    answer = api.request("POST", "/v1/completions", json=body, headers={**SAMPLED, "x-request-id": "mine"})
    tracing.close()

    request = collector.named("POST /v1/completions")
    assert (request.trace_id, request.parent_id, request.kind, request.status) == (TRACE, PARENT, 2, 0)
    assert request.attributes == {
        "http.request.method": "POST",
        "url.scheme": "http",
        "url.path": "/v1/completions",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gptserve.request.id": "mine",
    }
    completion = completion_of(collector, request)
    assert completion.name == f"text_completion {MODEL}"
    seconds = completion.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < seconds <= (completion.end - completion.start) / 1e9
    completion_id = completion.attributes.pop("gen_ai.response.id")
    assert completion_id in answer.text
    assert completion.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "gptserve",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": stream,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    queue, prefill, decode = collector.below(completion)
    assert [phase.name for phase in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert (queue.end, prefill.end) == (prefill.start, decode.start)
    assert [phase.end - phase.start for phase in (queue, prefill)] == pytest.approx([5e8, 2.5e8], abs=2)
    assert decode.start <= decode.end <= completion.end <= request.end
    assert collector.resource == {"service.name": "gptserve", "service.version": gptserve.__version__}


def test_a_request_without_a_parent_begins_a_trace_and_one_that_is_not_sampled_has_no_span(
    api: Api, tracing: Tracing, collector: Collector
) -> None:
    for header in ("", f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{'0' * 16}-01", "00-" + "a" * 600):
        api.request("GET", "/v1/models", headers={"traceparent": header, "tracestate": b"=,\xff"})
    tracing.close()

    assert [span.name for span in collector.spans] == ["GET /v1/models"] * 3
    assert {span.parent_id for span in collector.spans} == {""}
    assert len({span.trace_id for span in collector.spans} - {TRACE}) == 3


def test_each_choice_has_its_phases_up_to_a_limit(api: Api, tracing: Tracing, collector: Collector) -> None:
    num_choices = MAX_CHOICES + 1
    api.chat(n=num_choices, max_tokens=2)
    tracing.close()

    completion = completion_of(collector, collector.named("POST /v1/chat/completions"))
    assert completion.name == f"chat {MODEL}"
    assert completion.attributes["gen_ai.request.choice.count"] == num_choices
    assert completion.attributes["gen_ai.response.finish_reasons"] == ["length"] * num_choices
    phases = [(span.name, span.attributes["gptserve.choice.index"]) for span in collector.below(completion)]
    assert sorted(phases) == sorted(
        (name, index) for name in ("queue", "prefill", "decode") for index in range(MAX_CHOICES)
    )


def test_a_refused_request_is_no_error_of_the_server_and_one_that_the_engine_fails_is(
    api: Api, tracing: Tracing, collector: Collector
) -> None:
    api.complete(prompt="a", max_tokens=-2)
    api.engine.is_alive = False
    api.chat()
    api.get("/nowhere")
    tracing.close()

    refused, failed = collector.named("POST /v1/completions"), collector.named("POST /v1/chat/completions")
    assert (refused.status, refused.attributes["http.response.status_code"]) == (0, 400)
    assert refused.attributes["error.type"] == "invalid_value"
    assert (failed.status, failed.attributes["http.response.status_code"]) == (2, 503)
    assert failed.attributes["error.type"] == "engine_unavailable"
    assert collector.named("GET").attributes["http.response.status_code"] == 404
    assert collector.below(refused) == collector.below(failed) == []


def test_a_stream_that_its_client_leaves_ends_with_what_it_had(tracing: Tracing, collector: Collector) -> None:
    server = LiveServer(FakeEngineClient(waiting, auto=False), tracing=tracing)
    engine = server.engine
    body = {"prompt": "a", "max_tokens": 9, "stream": True}
    with server.running():
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as response:
            engine.wait_for(lambda: bool(engine.live_ids))
            engine.from_outside(engine.step)
            assert "a" in next(response.iter_lines())
        server.wait_until_idle()
    tracing.close()

    request = collector.named("POST /v1/completions")
    assert (request.status, request.attributes["http.response.status_code"]) == (0, 499)
    completion = completion_of(collector, request)
    assert completion.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert completion.attributes["gen_ai.usage.output_tokens"] == 1
    assert [span.name for span in collector.below(completion)] == ["queue", "prefill", "decode"]


def test_a_stream_that_the_engine_fails_is_an_error_although_its_status_is_200(
    make_api: Callable[..., Api], tracing: Tracing, collector: Collector
) -> None:
    def failing(request: Request) -> Iterator[TokenOutput]:
        yield next(waiting(request))
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="too bad")

    make_api(FakeEngineClient(failing), tracing=tracing).complete(prompt="a", stream=True)
    tracing.close()

    request = collector.named("POST /v1/completions")
    assert (request.status, request.attributes["http.response.status_code"]) == (2, 200)
    assert request.attributes["error.type"] == "generation_failed"
    completion = completion_of(collector, request)
    assert (completion.status, completion.attributes["gen_ai.response.finish_reasons"]) == (2, ["error"])


def test_probes_have_no_span_and_prompts_are_in_no_span_unless_they_are_logged(
    make_api: Callable[..., Api], tracing: Tracing, collector: Collector
) -> None:
    for log_prompts in (False, True):
        api = make_api(FakeEngineClient(), tracing=tracing, log_prompts=log_prompts)
        api.complete(prompt="a secret" * 1000)
        for path in ("/health", "/ready", "/metrics"):
            api.get(path)
    tracing.close()

    quiet, telling = [span for span in collector.spans if span.kind == 2]
    assert telling.attributes.pop("gptserve.request.prompt") == ("a secret" * 1000)[:4096]
    assert "secret" not in str(collector.spans)
    assert quiet.attributes.keys() == telling.attributes.keys()


def test_the_log_has_the_trace_of_each_request(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gptserve"):
        api.request("GET", "/v1/models", headers=SAMPLED)

    assert [getattr(record, "trace_id", None) for record in caplog.records] == [TRACE]


def test_what_the_library_says_is_logged_once_a_minute_and_what_strangers_cause_never(
    tracing: Tracing, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("opentelemetry.trace.span", *["opentelemetry.exporter"] * 2):
        logging.getLogger(name).warning("from %s", name)

    logged = [record.getMessage() for record in caplog.records if record.name.startswith("gptserve")]
    assert logged == ["traces: from opentelemetry.exporter"]


@pytest.mark.slow
def test_a_server_traces_its_real_phases_and_a_collector_that_hangs_delays_only_its_end() -> None:
    """One process for all, as it takes seconds to start."""
    with serve_collector() as collector:
        process = Process("--otlp-traces-endpoint", collector.url)
        try:
            with process.wait_until_ready() as client:
                body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
                assert client.post("/v1/completions", json=body, headers=SAMPLED).status_code == 200
                begun = client.post("/v1/chat/completions", json={"messages": MESSAGES, "background": True})
                path = f"/v1/chat/completions/{begun.json()['id']}"
                with client.stream("GET", f"{path}/events") as events:
                    assert "[DONE]" in "".join(events.iter_text())
                collector.gate.clear()
                body = {"input": "Once", "max_output_tokens": 4}  # so that something is left to send, however late
                assert client.post("/v1/responses", json=body, headers=SAMPLED).status_code == 200
            process.popen.terminate()
            status, log = process.wait()
        finally:
            process.kill()

    assert status == 0
    assert "the last traces are lost: the collector did not take them within 3 s" in log
    request = collector.named("POST /v1/completions")
    assert (request.trace_id, request.parent_id) == (TRACE, PARENT)
    background = collector.named("POST /v1/chat/completions")
    assert background.attributes["http.response.status_code"] == 202
    for parent, operation in ((request, "text_completion"), (background, "chat")):
        completion = completion_of(collector, parent)
        assert completion.name == f"{operation} storyteller"
        phases = collector.below(completion)
        assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
        assert completion.start < phases[1].start < phases[1].end < phases[2].end <= completion.end
