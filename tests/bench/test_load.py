"""Who is sent when, and what a request says."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bench.load import Load
from bench.stream import Outcome
from tests.bench.stand_in import DONE, OK, Clock, Request, bodies, chunk, token, with_server

ANSWER = OK + chunk(token(), DONE)

Requests = asyncio.Queue[Request]


def test_a_closed_loop_has_as_many_requests_under_way_as_clients() -> None:
    async def use(load: Load, requests: Requests, _: Clock) -> list[int]:
        task = asyncio.create_task(load.closed_loop(bodies(1, 1, 1, 1, 1), 2))
        under_way = [await requests.get(), await requests.get()]
        prompts = []
        while under_way:
            request = under_way.pop(0)
            assert requests.empty()  # none is sent before one has ended
            await request.send((1.0, ANSWER))
            request.hang_up()
            prompts += request.body["prompt"]
            if len(prompts) + len(under_way) < 5:
                under_way.append(await requests.get())
        assert len(await task) == 5
        return prompts

    assert with_server(use) == [0, 1, 2, 3, 4]


def test_a_closed_loop_counts_from_the_moment_a_client_is_free() -> None:
    async def use(load: Load, requests: Requests, _: Clock) -> list[Outcome]:
        task = asyncio.create_task(load.closed_loop(bodies(1, 1), 1))
        for _ in range(2):
            request = await requests.get()
            await request.send((3.0, ANSWER))
            request.hang_up()
        return await task

    assert [(outcome.due, outcome.ttft) for outcome in with_server(use)] == [(0.0, 3.0), (3.0, 3.0)]


def test_an_open_loop_waits_for_no_answer_and_counts_from_the_moment_that_was_meant() -> None:
    pauses = []

    async def oversleep(seconds: float) -> None:
        pauses.append(seconds)
        clocks[0].now += max(0.0, seconds) + 8

    clocks: list[Clock] = []

    async def use(load: Load, requests: Requests, clock: Clock) -> list[Outcome]:
        clocks.append(clock)
        task = asyncio.create_task(load.open_loop(bodies(1, 1), iter([0.0, 16.0, 99.0])))
        both = [await requests.get(), await requests.get()]
        for request in sorted(both, key=lambda request: request.body["prompt"]):
            await request.send((1.0, ANSWER))
            request.hang_up()
        return await task

    first, second = with_server(use, sleep=oversleep)
    assert pauses == [0.0, 8.0]
    assert (first.due, second.due) == (0.0, 16.0)
    assert (first.sent, second.sent) == (24.0, 24.0)
    assert (first.ttft, second.ttft) == (25.0, 10.0)


def test_a_request_is_one_of_openais_api_but_for_ignore_eos() -> None:
    async def use(load: Load, requests: Requests, _: Clock) -> Request:
        task = asyncio.create_task(load.closed_loop(bodies(5), 1))
        request = await requests.get()
        await request.send((0.0, ANSWER))
        request.hang_up()
        await task
        return request

    request = with_server(use, "/behind/a/proxy")
    lines = request.head.split("\r\n")
    assert lines[0] == "POST /behind/a/proxy/v1/completions HTTP/1.1"
    assert {"authorization: Bearer key", "content-type: application/json"} <= set(lines)
    assert any(line.startswith("host: 127.0.0.1:") for line in lines)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert request.body == {"model": "teller", "prompt": [0], "max_tokens": 5, **streamed}


def test_a_server_that_never_answers_fails_in_the_end() -> None:
    async def use(load: Load, requests: Requests, _: Clock) -> list[Outcome]:
        outcomes = await load.closed_loop(bodies(1), 1)
        (await requests.get()).hang_up()
        return outcomes

    [outcome] = with_server(use, limit_s=0.05)
    assert outcome.failure == "not ended after 0.05 s"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_is_not_there_fails(scheme: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{free.getsockname()[1]}"
        [outcome] = asyncio.run(Load(url, {}, "m").closed_loop(bodies(1), 1))

    assert outcome.failure == "no connection"
    assert "Connect call failed" in outcome.message
