"""POST /v1/completions over a FakeEngineClient. What is refused is in test_completions_refused.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

import gptserve.server.completions.plan
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.schemas.completions import Completion, CompletionRequest
from gptserve.server.text.output import Delta, join_deltas
from tests.server.conftest import MODEL, NO_IDS, OF_PROMPT, Api, LiveServer
from tests.server.fake_engine import INFO, FakeEngineClient, say

TEXT = 'Once, "é✓😀"\u2028\n'
NUM_TOKENS = len(TEXT.encode())


class Events:
    """A completion stream as a client sees it, line by line."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def next_data(self) -> str:
        """Return the data of the next event, skipping ids, comments and blanks."""
        for line in self._lines:
            if line.startswith("data: "):
                return line.removeprefix("data: ")
        raise EOFError

    def next_text(self) -> str:
        text: str = json.loads(self.next_data())["choices"][0]["text"]
        return text

    def rest(self) -> list[str]:
        """Return the data of all events that are left."""
        return [line.removeprefix("data: ") for line in self._lines if line.startswith("data: ")]


@contextlib.contextmanager
def stream(server: LiveServer, **body: Any) -> Iterator[Events]:
    request = {"prompt": "x", "stream": True, **body}
    with httpx.stream("POST", server.url + "/v1/completions", json=request, timeout=20) as response:
        assert response.status_code == 200
        yield Events(response)


def post(server: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json={"prompt": "x", **body}, timeout=20)


def send_raw(server: LiveServer, headers: str = "", **body: Any) -> socket.socket:
    """Send a request and return the socket, its answer unread."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", server.port))
    content = json.dumps({"prompt": "x", **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    client.sendall((head + headers).encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    return client


def parse_events(text: str) -> tuple[list[dict[str, Any]], str]:
    """Return the data of a plain stream's events, and what follows them; checks the frame of each.

    It reads as the field's load generators do: split at blank lines, strip `data: `, parse the rest.
    """
    *events, end = text.removesuffix("\n\n").split("\n\n")
    data = []
    for event in events:
        assert event.startswith("data: ")
        data.append(json.loads(event.removeprefix("data: ")))
        Completion.model_validate(data[-1], strict=True, extra="forbid")
    return data, end


def test_a_completion(api: Api) -> None:
    response = api.complete(prompt="hi", max_tokens=4, model=MODEL)
    body = response.json()
    Completion.model_validate(body, strict=True, extra="forbid")
    assert response.headers["content-type"] == "application/json"
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": "fake-1",
        "batch_invariant": True,
        "seed": api.engine.submitted[0].seed,
        "choices": [
            {
                "index": 0,
                "text": "abca",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                **NO_IDS,
                **OF_PROMPT,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("is_invariant", [True, False])
def test_answers_say_whether_they_depend_on_what_runs_beside_them(
    make_api: Callable[..., Api], is_invariant: bool
) -> None:
    api = make_api(FakeEngineClient(info=replace(INFO, batch_invariant=is_invariant)))
    for answer in (api.complete(prompt="hi").json(), api.chat("hi").json()):
        assert answer["batch_invariant"] is is_invariant
    chunks, _ = parse_events(api.complete(prompt="hi", stream=True).text)
    assert [chunk["batch_invariant"] for chunk in chunks] == [is_invariant] * len(chunks)


def test_an_unnamed_model_is_the_one_served(api: Api) -> None:
    assert api.complete(prompt="hi").json()["model"] == MODEL
    assert api.complete(prompt="hi", model=None).json()["model"] == MODEL


@pytest.mark.parametrize(("size", "in_thread"), [(100, False), (2**16, True)])
def test_a_large_body_is_parsed_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, size: int, in_thread: bool
) -> None:
    threads = []
    parse = CompletionRequest.model_validate

    def spy(value: dict[str, object]) -> CompletionRequest:
        threads.append(threading.current_thread() is not threading.main_thread())
        return parse(value)

    monkeypatch.setattr(CompletionRequest, "model_validate", spy)
    api.post_raw(b'{"prompt": "x", "max_tokens": 1}' + b" " * size)
    assert (threads, len(api.engine.submitted)) == ([in_thread], 1)


def test_sixteen_tokens_are_the_default(api: Api) -> None:
    assert api.complete(prompt="hi").json()["usage"]["completion_tokens"] == 16


def test_best_of_may_equal_n(api: Api) -> None:
    assert len(api.complete(prompt="hi", n=2, best_of=2).json()["choices"]) == 2


def test_logprobs_have_openais_shape(api: Api) -> None:
    logprobs = api.complete(prompt="hi", max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-97 / 8, -98 / 8],
        "top_logprobs": [
            {"\x00": 0.0, "\x01": -1 / 8, "a": -97 / 8},
            {"\x00": 0.0, "\x01": -1 / 8, "b": -98 / 8},
        ],
        "text_offset": [0, 1],
    }


def test_zero_logprobs_report_the_token_itself(api: Api) -> None:
    logprobs = api.complete(prompt="hi", max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -97 / 8}]


def test_echo_with_logprobs_scores_the_prompt_first(api: Api) -> None:
    choice = api.complete(prompt="hé", max_tokens=1, logprobs=1, echo=True).json()["choices"][0]
    assert choice["text"] == "héa"
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "a"],
        "token_logprobs": [None, -0xC3 / 8, -0xA9 / 8, -97 / 8],
        "top_logprobs": [
            None,
            {"\x00": 0.0, "bytes:\\xc3": -0xC3 / 8},
            {"\x00": 0.0, "bytes:\\xa9": -0xA9 / 8},
            {"\x00": 0.0, "a": -97 / 8},
        ],
        "text_offset": [0, 1, 1, 2],
    }


def test_echo_alone_returns_the_prompt(api: Api) -> None:
    choice = api.complete(prompt="hé", max_tokens=1, echo=True).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("héa", None)


def test_prompt_logprobs_have_vllms_shape(api: Api) -> None:
    body = api.complete(prompt=[[97, 0xC3, 0xA9], [98, 1]], n=2, max_tokens=1, prompt_logprobs=2).json()
    Completion.model_validate(body, strict=True, extra="forbid")
    best = {"0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"}}
    second = {"1": {"logprob": -1 / 8, "rank": 2, "decoded_token": "\x01"}}
    first_byte = {"195": {"logprob": -195 / 8, "rank": 196, "decoded_token": "bytes:\\xc3"}}
    second_byte = {"169": {"logprob": -169 / 8, "rank": 170, "decoded_token": "bytes:\\xa9"}}
    of_text = [None, first_byte | best | second, second_byte | best | second]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [of_text] * 2 + [[None, second | best]] * 2
    order = [list(entry) for entry in body["choices"][0]["prompt_logprobs"][1:]]
    assert order == [["195", "0", "1"], ["169", "0", "1"]]
    assert [choice["text"] for choice in body["choices"]] == ["a"] * 4


def test_prompt_logprobs_and_an_echos_logprobs_are_as_many_as_each_asks_for(api: Api) -> None:
    for prompt_logprobs, logprobs in ((0, 2), (2, 0)):
        body = api.complete(prompt="hi", max_tokens=1, echo=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        [choice] = body.json()["choices"]
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1 + prompt_logprobs]
        assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]] == [1 + logprobs] * 2


@pytest.mark.parametrize(
    ("fields", "in_thread"),
    [
        ({"prompt": "x" * 65, "prompt_logprobs": 0}, True),
        ({"prompt": "x" * 65, "echo": True, "logprobs": 0}, True),
        ({"prompt": "x", "logprobs": 1, "max_tokens": 65}, True),
        ({"prompt": "x", "logprobs": 1, "max_tokens": 64}, False),
        ({"prompt": "x" * 65}, False),
    ],
)
def test_many_scores_are_rendered_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], in_thread: bool
) -> None:
    threads = []

    def spy(deltas: list[Delta]) -> Delta:
        threads.append(threading.current_thread() is not threading.main_thread())
        return join_deltas(deltas)

    monkeypatch.setattr(gptserve.server.completions.plan, "join_deltas", spy)
    assert api.complete(**fields).status_code == 200
    assert threads == [in_thread]


def test_no_call_that_encodes_an_answer_has_more_than_one_of_its_choices(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    encode = json.JSONEncoder.encode

    def spy(self: json.JSONEncoder, value: object) -> str:
        encoded.append(encode(self, value))
        return encoded[-1]

    monkeypatch.setattr(json.JSONEncoder, "encode", spy)
    response = api.complete(prompt="hi", max_tokens=1, n=3, logprobs=1, prompt_logprobs=1)
    assert [len(entry) for entry in response.json()["choices"]] == [8] * 3
    assert max(text.count('"finish_reason"') for text in encoded) == 1


def test_prompt_logprobs_come_only_where_they_are_asked_for(api: Api) -> None:
    assert api.complete(prompt="hi", echo=True, logprobs=1).json()["choices"][0]["prompt_logprobs"] is None
    assert "logprobs" in api.complete(prompt="hi", prompt_logprobs=1).json()["choices"][0]


@pytest.mark.parametrize("streams", [False, True])
def test_no_tokens_with_echo_give_the_prompt_alone(api: Api, streams: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    response = api.complete(prompt="hé", max_tokens=0, echo=True, logprobs=1, n=2, **options)
    if streams:
        (*parts, last), _ = parse_events(response.text)
        choices, usage = [part["choices"][0] for part in parts], last["usage"]
    else:
        choices, usage = response.json()["choices"], response.json()["usage"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hé", "length", None)
        assert choice["logprobs"]["token_logprobs"] == [None, -0xC3 / 8, -0xA9 / 8]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


def test_a_stream_has_its_headers_and_ends_once(api: Api) -> None:
    response = api.complete(prompt="x", stream=True, max_tokens=3)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    chunks, end = parse_events(response.text)
    assert end == "data: [DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["seed"] == api.engine.submitted[0].seed
    assert "usage" not in chunks[0]


def test_the_last_chunk_has_the_usage_where_asked_for(api: Api) -> None:
    response = api.complete(prompt="x", stream=True, max_tokens=2, n=2, stream_options={"include_usage": True})
    chunks, _ = parse_events(response.text)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_usage_so_far_comes_with_every_chunk_where_asked_for(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = api.complete(prompt="x", stream=True, max_tokens=3, stream_options=options)
    chunks, _ = parse_events(response.text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("include", [{}, {"include_usage": False}, {"include_usage": None}])
def test_usage_so_far_comes_only_where_usage_is_included(api: Api, include: dict[str, Any]) -> None:
    options = {"continuous_usage_stats": True, **include}
    for response in (
        api.complete(prompt="x", stream=True, max_tokens=3, stream_options=options),
        api.chat(stream=True, max_tokens=3, stream_options=options),
    ):
        assert response.status_code == 200
        assert "usage" not in response.text


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"prompt": ["x", "yz"], "n": 2, "echo": True},
        {"logprobs": 3},
        {"logprobs": 2, "echo": True, "prompt": [120, 0xC3]},
        {"stop": ["é✓"]},
        {"stop": ["✓", "never", 'e, "x'], "logprobs": 0},
        {"stop_token_ids": [0xF0]},
        {"max_tokens": 9},
    ],
)
def test_a_stream_adds_up_to_the_whole(make_api: Callable[..., Api], body: dict[str, Any]) -> None:
    api = make_api(FakeEngineClient(say(TEXT, then_eos=True)))
    request = {"prompt": "x", "max_tokens": 100, "seed": 1, **body}
    whole = api.complete(**request).json()
    response = api.complete(**request, stream=True, stream_options={"include_usage": True})
    chunks, _ = parse_events(response.text)
    assert chunks[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["stop_reason"] == expected["stop_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
        if expected["logprobs"] is None:
            assert all(part["logprobs"] is None for part in parts)
        else:
            for name, values in expected["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values


def test_a_stream_shows_whole_characters_only(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(say(TEXT)))
    chunks, _ = parse_events(api.complete(prompt="x", stream=True, max_tokens=NUM_TOKENS).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(TEXT), "a character a chunk, no empty ones"


def test_tokens_reach_the_client_as_they_come(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)
    with stream(serve(engine), max_tokens=3) as events:
        for expected in "abc":
            engine.from_outside(engine.step)
            assert events.next_text() == expected
        assert events.rest() == ["[DONE]"]


def test_steps_that_pile_up_go_out_together(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)

    def three_steps() -> None:
        for _ in range(3):
            engine.step()

    with stream(serve(engine), max_tokens=3) as events:
        engine.from_outside(three_steps)
        parts = list(events.response.iter_raw())
    assert parts[0].count(b"data: ") == 3


def test_outputs_that_come_together_with_a_failure_are_sent_before_it(serve: Callable[..., LiveServer]) -> None:
    def fail_third(request: Any) -> Iterator[TokenOutput]:
        for _, output in zip(range(2), say("ab")(request), strict=False):
            yield output
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="it broke")

    engine = FakeEngineClient(fail_third, auto=False)

    def three_steps() -> None:
        for _ in range(3):
            engine.step()

    with stream(serve(engine), max_tokens=5) as events:
        engine.from_outside(three_steps)
        assert [events.next_text(), events.next_text()] == ["a", "b"]
        [error] = events.rest()
    assert json.loads(error)["error"]["message"] == "choice 0: it broke"


def test_a_silent_stream_is_kept_alive(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)
    with stream(serve(engine, sse_keep_alive_interval_s=0.02), max_tokens=2) as events:
        lines = events.response.iter_lines()
        assert [next(lines) for _ in range(6)] == [": keep-alive", "", ":", "", ": keep-alive", ""]
        engine.from_outside(engine.step)
        engine.from_outside(engine.step)
        rest = [line for line in lines if line.startswith(("data", ":"))]
    assert rest[-1] == "data: [DONE]"
    assert sum(line.startswith("data: {") for line in rest) == 2


def test_a_stream_that_is_not_silent_has_no_comments(api: Api) -> None:
    assert "keep-alive" not in api.complete(prompt="x", stream=True, max_tokens=200).text


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_is_aborted_within_one_step(
    serve: Callable[..., LiveServer], is_stream: bool, num_steps: int
) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    client = send_raw(server, stream=is_stream, n=2, max_tokens=100)
    engine.wait_for(lambda: len(engine.submitted) == 2)
    for _ in range(num_steps):
        engine.from_outside(engine.step)
    engine.wait_for(lambda: engine.num_outputs == 2 * num_steps)
    assert engine.aborted == [], "a client that waits is served"
    client.close()
    engine.wait_for(lambda: len(engine.aborted) == 2)
    assert engine.live_ids == []
    assert post(server, max_tokens=0).status_code == 400
    wait_until_idle(server)


@pytest.mark.slow
def test_two_hundred_clients_that_hang_up_leave_nothing(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(info=replace(INFO, max_model_len=10**6))
    server = serve(engine)
    generator = random.Random(0)
    for _ in range(200):
        client = send_raw(server, stream=generator.random() < 0.7, max_tokens=10**5, n=generator.randint(1, 3))
        if generator.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                client.settimeout(generator.random() / 100)
                client.recv(generator.choice([1, 1000]))
        client.close()
    assert post(server, max_tokens=5).json()["choices"][0]["text"] == "abcab"
    engine.wait_for(lambda: engine.live_ids == [])
    wait_until_idle(server)


def wait_until_idle(server: LiveServer) -> None:
    """Wait until the server counts no completion as in flight."""
    idle = threading.Event()

    async def wait() -> None:
        await server.app.state.lifecycle.wait_idle()
        idle.set()

    tasks = []
    server.engine.from_outside(lambda: tasks.append(asyncio.ensure_future(wait())))
    assert idle.wait(20)


def test_a_client_that_reads_slowly_blocks_nobody_and_loses_nothing(serve: Callable[..., LiveServer]) -> None:
    num_tokens = 30_000  # some 8 MB of events: more than the sockets between hold
    engine = FakeEngineClient(info=replace(INFO, max_model_len=10**6))
    server = serve(engine)
    slow = send_raw(server, stream=True, max_tokens=num_tokens)
    engine.wait_for(lambda: engine.num_outputs >= num_tokens)
    assert server.app.state.lifecycle.num_active == 1, "its answer waits in the server"
    assert post(server, max_tokens=5).json()["choices"][0]["text"] == "abcab"
    with slow:
        received = b"".join(iter(lambda: slow.recv(2**20), b""))
    assert received.count(b"data: {") == num_tokens
    assert b"data: [DONE]" in received[-100:]


def test_draining_lets_streams_finish(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    with stream(server, max_tokens=2) as events:
        engine.from_outside(engine.step)
        assert events.next_text() == "a"
        server.app.state.lifecycle.drain()
        assert post(server).status_code == 503
        assert httpx.get(server.url + "/ready").status_code == 503
        assert httpx.get(server.url + "/health").status_code == 200
        engine.from_outside(engine.step)
        assert events.next_text() == "b"
        assert events.rest() == ["[DONE]"]


def test_an_engine_that_dies_ends_a_stream_with_an_error(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    with stream(server, max_tokens=5) as events:
        engine.from_outside(engine.step)
        assert events.next_text() == "a"
        engine.from_outside(engine.die)
        (data,) = events.rest()
    assert json.loads(data) == {
        "error": {
            "message": "the engine has died: killed",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }
    assert post(server).status_code == 503
    assert httpx.get(server.url + "/health").status_code == 503


def test_an_engine_that_dies_is_a_503_while_nothing_was_sent(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    with send_raw(server, max_tokens=5) as client:
        engine.wait_for(lambda: len(engine.submitted) == 1)
        engine.from_outside(engine.die)
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5" in answer


SILENCE_AFTER = 2


def fall_silent(request: Any) -> Iterator[TokenOutput]:
    """A reply of two tokens, after which nothing comes."""
    return itertools.islice(say("abc")(request), SILENCE_AFTER)


@pytest.mark.parametrize("background", [True, False])
def test_what_has_not_ended_in_time_ends_with_the_text_so_far(
    serve: Callable[..., LiveServer], background: bool
) -> None:
    engine = FakeEngineClient(fall_silent)
    server = serve(engine)
    headers = {"idempotency-key": "kept"} if background else {}
    body = {"prompt": "x", "n": 2, "timeout_ms": 50}
    response = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=20)
    answer = response.json()
    assert response.status_code == 200
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["timeout", "timeout"]
    assert all("ab".startswith(choice["text"]) for choice in answer["choices"])
    assert sum(len(choice["text"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]
    assert sorted(engine.aborted) == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert engine.live_ids == []
    ended = 'gptserve_request_success_total{finished_reason="timeout",model_name="test-model"} 2.0'
    assert ended in httpx.get(server.url + "/metrics").text


def test_a_stream_out_of_time_has_a_last_chunk_that_says_so(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(fall_silent))
    with stream(server, timeout_ms=50, stream_options={"include_usage": True}) as events:
        *chunks, usage, end = events.rest()
    last = json.loads(chunks[-1])["choices"][0]
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("", "length", "timeout")
    assert json.loads(usage)["usage"]["completion_tokens"] == len(chunks) - 1
    assert end == "[DONE]"


def test_what_ends_in_time_does_not_know_of_a_limit(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    answer = post(server, timeout_ms=2**31 - 1, max_tokens=3).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abc", "length")


def test_a_request_that_is_not_admitted_in_time_is_a_503_or_an_error_event(make_api: Callable[..., Api]) -> None:
    def refuse(request: Any) -> Iterator[TokenOutput]:
        reason = "the request was not admitted within 5.0 s"
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.QUEUE_TIMEOUT, error=reason)

    api = make_api(FakeEngineClient(refuse))
    whole, streamed = api.complete(prompt="x"), api.complete(prompt="x", stream=True)
    expected = {
        "message": "choice 0: the request was not admitted within 5.0 s",
        "type": "server_error",
        "param": None,
        "code": "queue_timeout",
    }
    assert (whole.status_code, whole.headers["retry-after"], whole.json()["error"]) == (503, "5", expected)
    assert json.loads(streamed.text.removeprefix("data: ")) == {"error": expected}


def test_seed_minus_one_draws_one(api: Api) -> None:
    seeds = {api.complete(prompt="x", seed=-1).json()["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert min(seeds) >= 0
