"""POST /v1/messages over a FakeEngineClient: answers, events and errors in Anthropic's shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.server.schemas.messages import CountedTokens, MessageObject, MessagesErrorBody
from tests.server.conftest import MODEL, Api, LiveServer
from tests.server.fake_engine import EOS, FakeEngineClient, say
from tests.server.pydantic_says import NO_INTEGER, NO_STRING

MakeApi = Callable[..., Api]
Serve = Callable[..., LiveServer]
USER = {"role": "user", "content": "hi"}
NO_CACHE = {
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens_details": {"thinking_tokens": 0},
}


def post(api: Api, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    given = {"messages": [USER], **({"max_tokens": 100} if path == "/v1/messages" else {}), **body}
    return api.request("POST", path, json={name: value for name, value in given.items() if value is not ...})


def answer_of(api: Api, **body: Any) -> dict[str, Any]:
    response = post(api, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    MessageObject.model_validate(answer, strict=True, extra="forbid")
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named by its type."""
    events = []
    for block in text.strip("\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def stream_of(api: Api, **body: Any) -> list[dict[str, Any]]:
    response = post(api, **body, stream=True)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


def prompt_of(api: Api) -> str:
    return bytes(id_ for id_ in api.engine.submitted[-1].prompt_token_ids if id_ != EOS).decode()


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events make, as Anthropic's clients put it together."""
    start, *between, told, stop = events
    assert (start["type"], told["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    content: list[dict[str, Any]] = message["content"]
    is_open = False
    for event in between:
        if event["type"] == "content_block_start":
            assert not is_open
            content.append({**event["content_block"], "pieces": []})
        assert event["index"] == len(content) - 1
        is_open = event["type"] != "content_block_stop"
        block = content[-1]
        if event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            if kind == "input_json_delta":
                block["pieces"].append(event["delta"]["partial_json"])
            else:
                name = kind.removesuffix("_delta")
                assert block["type"] == name or (block["type"], name) == ("thinking", "signature")
                block[name] += event["delta"][name]
    assert not is_open
    for block in content:
        pieces = "".join(block.pop("pieces"))
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(pieces or "{}")
    return {**message, **told["delta"], "usage": {**message["usage"], **told["usage"]}}


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    MessagesErrorBody.model_validate(body, strict=True, extra="forbid")
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


def invalid(message: str) -> tuple[int, str, str]:
    return 400, "invalid_request_error", message


def saying(text: str, **options: Any) -> FakeEngineClient:
    return FakeEngineClient(say(text, then_eos=True), **options)


def test_an_answer_has_all_that_anthropics_has(make_api: MakeApi) -> None:
    answer = answer_of(make_api(saying("Hé!")), seed=3)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hé!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 5, **NO_CACHE},
        "system_fingerprint": "fake-1",
        "batch_invariant": True,
        "seed": 3,
    }


def test_the_events_of_a_text(make_api: MakeApi) -> None:
    start, *events = stream_of(make_api(saying("Hé")), seed=3)
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 10, "output_tokens": 0, **NO_CACHE},
            "system_fingerprint": "fake-1",
            "batch_invariant": True,
            "seed": 3,
        },
    }
    assert events == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "H"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "é"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": 10, "output_tokens": 4, **NO_CACHE},
        },
        {"type": "message_stop"},
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "one two", "end_turn", None),
        ({"max_tokens": 3}, "one", "max_tokens", None),
        ({"stop_sequences": ["x", " t"]}, "one", "stop_sequence", " t"),
        ({"stop": "two"}, "one ", "stop_sequence", "two"),
        ({"stop_sequences": []}, "one two", "end_turn", None),
        ({"stop_sequences": ["one"]}, "", "stop_sequence", "one"),
    ],
)
def test_why_an_answer_ended(make_api: MakeApi, fields: Any, text: str, reason: str, sequence: str | None) -> None:
    api = make_api(saying("one two"))
    answer, again = answer_of(api, **fields), joined(stream_of(api, **fields))
    for message in (answer, again):
        assert message["content"] == [{"type": "text", "text": text}]
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_tokens_found_in_the_cache_are_counted_apart(make_api: MakeApi) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        outputs = say("ab", then_eos=True)(request)
        return (replace(output, num_cached_tokens=8) for output in outputs)

    api = make_api(FakeEngineClient(reply))
    expected = {**NO_CACHE, "input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 3}
    assert answer_of(api)["usage"] == joined(stream_of(api))["usage"] == expected


def test_parameters_reach_the_engine(make_api: MakeApi) -> None:
    api = make_api(saying("a"), priority_scheduling=True)
    given = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "priority": -1}
    answer_of(api, **given, max_tokens=9, metadata={"user_id": "u"})
    request = api.engine.submitted[0]
    params = {name: getattr(request.params, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")}
    assert params == {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 9}
    assert (request.seed, request.priority) == (5, -1)


def test_the_user_of_the_metadata_is_in_the_log_line(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="gptserve")
    answer = answer_of(api, metadata={"user_id": "someone"})
    [line] = [record for record in caplog.records if record.name == "gptserve.server.http.envelope"]
    assert (vars(line)["user"], vars(line)["completion_id"]) == ("someone", answer["id"])
    assert {"prompt_tokens", "completion_tokens", "ttft_s", "finish_reasons"} <= vars(line).keys()


@pytest.mark.parametrize("max_tokens", [246, 247, 128_000, 2**40])
def test_max_tokens_beyond_the_context_are_capped(make_api: MakeApi, max_tokens: int) -> None:
    api = make_api(saying("a"))
    response = post(api, max_tokens=max_tokens)
    assert response.status_code == 200
    assert api.engine.submitted[0].params.max_tokens == 246
    assert response.headers.get("x-gptserve-max-tokens") == (None if max_tokens == 246 else "246")


@pytest.mark.parametrize("text", ["x" * 300, "x" * 9000])
def test_a_prompt_beyond_the_context_is_refused_in_words_that_clients_look_for(refusing_api: Api, text: str) -> None:
    status, kind, message = error_of(post(refusing_api, messages=[{"role": "user", "content": text}]))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("The prompt is too long. This model's maximum context length is 256 tokens")


def test_an_answer_without_a_text_has_an_empty_one(make_api: MakeApi) -> None:
    api = make_api(saying(""))
    assert answer_of(api)["content"] == joined(stream_of(api))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("system", "messages", "prompt"),
    [
        ("Be brief.", [USER], "[system]Be brief.[user]hi>"),
        (
            [{"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in "ab"],
            [USER],
            "[system]a\nb[user]hi>",
        ),
        ([], [USER], "[user]hi>"),
        ("", [USER], "[user]hi>"),
        (..., [USER, {"role": "user", "content": [{"type": "text", "text": "ho"}]}], "[user]hi\nho>"),
        (..., [USER, {"role": "assistant", "content": "Yes"}, USER], "[user]hi[assistant]Yes[user]hi>"),
        (..., [USER, {"role": "system", "content": "S"}], "[user]hi[system]S>"),
        ("A", [{"role": "system", "content": "S"}, USER], "[system]A[system]S[user]hi>"),
        (..., [USER, {"role": "assistant", "content": "The cat"}], "[user]hi[assistant]The cat"),
        (
            ...,
            [USER, *({"role": "assistant", "content": [{"type": "text", "text": t, "citations": None}]} for t in "ab")],
            "[user]hi[assistant]a\nb",
        ),
        (..., [{"role": "user", "content": []}], "[user]>"),
    ],
)
def test_the_conversation_becomes_a_chat(make_api: MakeApi, system: Any, messages: Any, prompt: str) -> None:
    api = make_api(saying("a"))
    answer_of(api, system=system, messages=messages)
    assert prompt_of(api) == prompt


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": ...}, "max_tokens is required"),
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1, got 0"),
        ({"max_tokens": "9"}, f"max_tokens: {NO_INTEGER}, got '9'"),
        ({"messages": ...}, "messages is required"),
        ({"messages": []}, "messages: list should have at least 1 item, not 0, got []"),
        ({"messages": "hi"}, "messages: input should be an array, got 'hi'"),
        ({"messages": [5]}, "messages[0]: input should be an object, got 5"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role: input should be 'user', 'assistant' or 'system', got 'tool'",
        ),
        (
            {"messages": [{"role": ["user"], "content": [{"type": "text", "text": "x"}]}]},
            "messages[0].role: input should be 'user', 'assistant' or 'system', got ['user']",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: input should be a string or a list of blocks, got 5",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]: input should be an object, got 5"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type is required"),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": kind, "source": {}}]}]},
                f"messages[0].content[0]: a block of the type '{kind}' is not supported by this server",
            )
            for kind in ("image", "document", "search_result", "container_upload", "server_tool_use")
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[0].content[0]: a block of the type 'tool_use' may not be in a message of the role user",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0]: a block of the type 'tool_result' may not be in a message of the role assistant",
        ),
        (
            {"system": [{"type": "image", "source": {}}]},
            "system[0]: a block of the type 'image' is not supported by this server",
        ),
        ({"system": 5}, "system: input should be a string or a list of blocks, got 5"),
        ({"system": [{"type": "text", "text": 5}]}, f"system[0].text: {NO_STRING}, got 5"),
        (
            {"stop_sequences": "a"},
            "stop_sequences: input should be an array, got 'a'",
        ),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop and stop_sequences must not both be given"),
        ({"temperature": 5}, "temperature must be in [0.0, 2.0], got 5.0"),
        ({"n": 2}, "n is not a field of this route"),
        ({"max_completion_tokens": 2}, "max_completion_tokens is not a field of this route"),
        ({"temperaturee": 1}, "unknown field temperaturee; did you mean temperature?"),
        ({"container": "c"}, "a container is not supported by this server; leave out container"),
        (
            {"mcp_servers": [{"url": "u"}]},
            "a server of MCP that this server calls is not supported by this server; leave out mcp_servers",
        ),
        ({"thinking": {"type": "on"}}, "thinking.type: input should be 'enabled', 'disabled' or 'adaptive', got 'on'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must be given with the type enabled"),
        ({"metadata": {"user_id": 5}}, f"metadata.user_id: {NO_STRING}, got 5"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
        (
            {"output_config": {"format": {"type": "json"}}},
            "output_config.format.type: input should be 'json_schema', got 'json'",
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format and output_config.format must not both be given",
        ),
    ],
)
def test_what_breaks_a_rule_is_refused_in_words(refusing_api: Api, fields: Any, message: str) -> None:
    assert error_of(post(refusing_api, **fields)) == invalid(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the body is not valid JSON: EOF while parsing an object at line 1 column 1"),
        (b"[]", "the body: input should be an object, got []"),
        (b'{"a": ' + b"[" * 70_000, "the body may have '[' at most 65536 times, in strings or not, got 70000"),
        (b'{"max_tokens": NaN}', "the body is not valid JSON: expected value at line 1 column 16"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_no_body_is_refused(refusing_api: Api, path: str, content: bytes, message: str) -> None:
    assert error_of(refusing_api.request("POST", path, content=content)) == invalid(message)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_other_errors_have_anthropics_envelope_too(make_api: MakeApi, path: str) -> None:
    api = make_api(saying("a"), api_keys=("k",), max_body_bytes=200)
    key = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "b-2025-01-01"}
    body = {"messages": [USER], "max_tokens": 5}

    def send(method: str = "POST", path: str = path, **options: Any) -> tuple[int, str, str]:
        return error_of(api.request(method, path, **{"json": body, "headers": key, **options}))

    why = "this server needs an API key: send the header 'Authorization: Bearer KEY'"
    assert send(headers={}) == (401, "authentication_error", why)
    why = "Incorrect API key provided: it is not one of this server's"
    assert send(headers={"x-api-key": "x"}) == (401, "authentication_error", why)
    why = "model 'claude-9' does not exist; this server has 'test-model'"
    assert send(json={**body, "model": "claude-9"}) == (404, "not_found_error", why)
    assert send("GET") == (405, "invalid_request_error", f"this route does not take GET {path}; it takes POST")
    why = f"there is no route POST {path}/x; /openapi.json lists the routes"
    assert send(path=f"{path}/x") == (404, "not_found_error", why)
    status, kind, why = send(json={**body, "system": "x" * 300})
    assert (status, kind) == (413, "request_too_large")
    assert why.startswith("the body may have at most 200 bytes, got ")
    headers = {**key, "content-type": "text/plain"}
    why = "content-type must be application/json, got text/plain"
    assert send(headers=headers) == (415, "invalid_request_error", why)
    assert api.engine.submitted == []
    assert api.request("POST", path, json=body, headers=key).status_code == 200
    assert "Bearer" in api.request("POST", path).headers["www-authenticate"]


def test_a_full_queue_and_a_dead_engine_tell_when_to_try_again(api: Api) -> None:
    api.engine.max_requests = 0
    response = post(api)
    assert error_of(response) == (429, "rate_limit_error", "the queue is full")
    assert response.headers["retry-after"] == "7"
    api.engine.is_alive = False
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = post(api, path)
        message = "no engine is running: it is loading or has died"
        assert error_of(response) == (503, "overloaded_error", message)
        assert response.headers["retry-after"] == "5"


def test_an_unexpected_error_tells_nothing(make_api: MakeApi) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        raise KeyError("secret")

    expected = (500, "api_error", "the server failed to answer this request")
    assert error_of(post(make_api(FakeEngineClient(reply)))) in (expected,)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_answer_is_an_error_and_in_a_stream_the_last_event(make_api: MakeApi, *, stream: bool) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        yield TokenOutput(request.request_id, (ord("a"),))
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="it broke")

    api = make_api(FakeEngineClient(reply))
    if not stream:
        assert error_of(post(api)) == (500, "api_error", "choice 0: it broke")
        return
    *events, error = events_of(post(api, stream=True).text)
    assert error == {"type": "error", "error": {"type": "api_error", "message": "choice 0: it broke"}}
    assert [event["type"] for event in events] == ["message_start", "content_block_start", "content_block_delta"]


def test_a_stream_ends_with_an_error_when_the_engine_dies(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("a"), auto=False))
    body = {"messages": [USER], "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start", "before there is a token"
        server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
        server.engine.from_outside(server.engine.die)
        rest = list(lines)
    error = json.loads(rest[-2].removeprefix("data: "))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "the engine has died: killed"}}


def test_a_silent_stream_is_kept_alive_by_pings(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("a", then_eos=True), auto=False), sse_keep_alive_interval_s=0.001)
    body = {"messages": [USER], "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=20) as response:
        lines = response.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert (next(lines), next(lines)) == ('data: {"type":"ping"}', "")
        server.engine.from_outside(server.engine.step)
        server.engine.wait_for(lambda: server.engine.num_outputs == 1)
        server.engine.from_outside(server.engine.step)
        rest = events_of("\n".join(lines))
    types = [event["type"] for event in rest if event["type"] != "ping"]
    expected = ["start", "delta", "stop"]
    assert types == [*(f"content_block_{name}" for name in expected), "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_computed_for_no_more(serve: Serve, *, stream: bool) -> None:
    server = serve(FakeEngineClient(say("a"), auto=False))
    body = {"messages": [USER], "max_tokens": 9, "stream": stream}
    with httpx.Client(timeout=20) as client:
        request = client.build_request("POST", f"{server.url}/v1/messages", json=body)
        if stream:
            client.send(request, stream=True).close()
        else:
            request.extensions["timeout"]["read"] = 0.1
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
    server.wait_until_idle()


def test_unknown_fields_and_what_asks_for_nothing_are_let_through(make_api: MakeApi) -> None:
    cache = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "hi", **cache, "citations": []}
    body = {
        "messages": [{"role": "user", "content": [text], **cache}],
        "system": [{**text, "text": "S"}],
        "service_tier": "auto",
        "mcp_servers": [],
        "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **cache,
    }
    api = make_api(saying("a"))
    response = post(api, **body)
    assert (response.status_code, "x-gptserve-ignored" in response.headers) == (200, False), response.text
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    fields = {"context_management": edits, "zzz": 1, "messages": [{**USER, "yyy": 1}]}
    response = post(api, **fields)
    assert response.headers["x-gptserve-ignored"] == "context_management, zzz, messages.yyy"
    strict = make_api(saying("a"), strict_fields=True)
    assert post(strict, **body).status_code == 200
    message = "context_management: no edit is supported by this server"
    assert error_of(post(strict, context_management=edits)) == invalid(message)
    assert error_of(post(strict, zzz=1)) == invalid("unknown field zzz, got 1")


def test_a_name_that_a_client_insists_on_may_be_served(make_api: MakeApi) -> None:
    api = make_api(saying("a"), name_patterns=("claude-*",))
    assert answer_of(api, model="claude-opus-5")["model"] == MODEL
    assert error_of(post(api, model="gpt"))[:2] == (404, "not_found_error")
    assert [model["id"] for model in api.get("/v1/models").json()["data"]] == [MODEL]


def test_a_model_without_a_template_is_told_so(make_api: MakeApi) -> None:
    api = make_api(saying("a"), template=None)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, kind, message = error_of(post(api, path))
        assert (status, kind) == (400, "invalid_request_error")
        assert message.startswith("this model has no chat template")


def test_what_a_template_refuses_is_refused_in_its_words(make_api: MakeApi) -> None:
    template = "{% for m in messages %}{{ raise_exception('no ' ~ m.role) }}{% endfor %}"
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, kind, message = error_of(post(make_api(saying("a"), template=template), path))
        assert (status, kind) == (400, "invalid_request_error")
        assert message.endswith("no user")


def test_tokens_are_counted_as_an_answer_counts_them(make_api: MakeApi) -> None:
    api = make_api(saying("a"))
    body = {
        "messages": [USER, {"role": "assistant", "content": "ho"}, USER],
        "system": "S",
        "stop_sequences": ["x"],
    }
    for more in ({}, {"max_tokens": 9}, {"stream": True}, {"metadata": {"user_id": "u"}}):
        response = post(api, "/v1/messages/count_tokens", **body, **more)
        assert response.status_code == 200, response.text
        CountedTokens.model_validate(response.json(), strict=True, extra="forbid")
        assert "x-gptserve-ignored" not in response.headers
    assert api.engine.submitted == []
    assert response.json() == {"input_tokens": answer_of(api, **body)["usage"]["input_tokens"]}
    assert (
        post(api, "/v1/messages/count_tokens", messages=[{**USER, "content": "x" * 300}]).json()["input_tokens"] > 300
    )


@given(text=st.text(max_size=40), stops=st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_the_events_of_any_text_make_the_answer(text: str, stops: list[str]) -> None:
    api = ANY[0]
    api.engine.reply = say(text, then_eos=True)
    fields = {"stop_sequences": stops, "seed": 1, "max_tokens": 20}
    answer, streamed = answer_of(api, **fields), joined(stream_of(api, **fields))
    assert {**streamed, "id": ""} == {**answer, "id": ""}


ANY: list[Api] = []


@pytest.fixture(scope="module", autouse=True)
def any_api() -> Iterator[None]:
    """One for all examples of a test."""
    ANY.append(Api(FakeEngineClient()))
    yield
    ANY.pop().close()


NAMES = st.sampled_from(
    [
        *(
            "type",
            "text",
            "role",
            "content",
            "name",
            "id",
            "input",
            "tool_use_id",
            "thinking",
            "signature",
            "tool_name",
        ),
        *("input_schema", "budget_tokens", "display", "format", "schema", "effort", "user_id", "edits", "is_error"),
    ]
)
WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"),
        *(
            "tool_reference",
            "custom",
            "web_search_1",
            "any",
            "tool",
            "auto",
            "enabled",
            "adaptive",
            "json_schema",
            "",
            "é",
        ),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
BLOCKS = st.fixed_dictionaries(
    {"type": WORDS},
    optional={"text": WORDS, "id": WORDS, "name": WORDS, "input": VALUES, "tool_use_id": WORDS, "content": VALUES},
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": WORDS, "content": WORDS | st.lists(BLOCKS, max_size=3) | VALUES}), max_size=4
)
FIELDS = st.fixed_dictionaries(
    {"max_tokens": st.just(5) | VALUES, "messages": MESSAGES | VALUES},
    optional=dict.fromkeys(
        (
            *("system", "tools", "tool_choice", "thinking", "metadata", "output_config", "output_format", "stream"),
            *("stop_sequences", "context_management", "mcp_servers", "chat_template_kwargs", "model", "temperature"),
        ),
        VALUES,
    ),
)


@settings(max_examples=2 * settings().max_examples)
@given(FIELDS, st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]))
def test_whatever_is_sent_is_answered_or_refused_in_words(fields: dict[str, Any], path: str) -> None:
    api = ANY[0]
    api.engine.reply = say("a", then_eos=True)
    response = api.request("POST", path, json=fields)
    if response.status_code != 200:
        status, kind, message = error_of(response)
        assert (status, kind) in ((400, "invalid_request_error"), (404, "not_found_error")), message
        assert message
