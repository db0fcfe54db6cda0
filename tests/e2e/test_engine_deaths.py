"""Clients of a real server whose engine dies: nobody loses, repeats or changes an event, and operators are told."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.server.completions.sse import AFTER_KEEP_ALIVE, KEEP_ALIVE
from tests.engine.held_engine import VARIABLE, EngineGate
from tests.engine.mortal_engine import POISON
from tests.server.serving import LIMIT_S, MORTAL, Process

BODIES: list[dict[str, Any]] = [
    {
        "prompt": prompt,
        "max_tokens": 250,
        "seed": seed,
        "temperature": 0.9,
        "ignore_eos": True,
        "stream": seed % 4 > 0,
        "logprobs": 1 if seed % 3 == 0 else None,
        "n": 2 if seed % 5 == 0 else 1,
        "bad_words": ["the", "and"] if seed % 2 else None,
        "min_tokens": 200 if seed % 2 else None,
    }
    for seed, prompt in enumerate(["Once upon a time", "The fox", "A long way from here,", "Mia said"] * 8)
]
pytestmark = pytest.mark.timeout(600)  # an engine is loaded up to five times
Launch = Callable[..., Process]
Harm = Callable[[httpx.AsyncClient], Awaitable[None]]
Events = dict[int, list[Any]]
"""What each choice's events add to it, by its index: whose comes first is for the scheduler to say."""


@pytest.fixture
def gate(tmp_path: Path) -> EngineGate:
    return EngineGate(tmp_path)


@pytest.fixture
def launch(gate: EngineGate) -> Iterator[Launch]:
    launched: list[Process] = []

    def start(*flags: str) -> Process:
        launched.append(Process(*flags, main=MORTAL, **{VARIABLE: str(gate.folder)}))
        return launched[-1]

    yield start
    for process in launched:
        process.kill()


async def events_of(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> Events:
    """Return the events of a stream, or a plain answer's choices; set `begun` by the first.

    What is compared is every event of every choice, in order: one that is lost or comes twice is seen by that.
    """
    if not body["stream"]:
        begun.set()
        answer = (await client.post("/v1/completions", json=body)).json()
        return {choice["index"]: [choice] for choice in answer["choices"]}
    events: Events = {index: [] for index in range(body["n"])}
    is_done = False
    async with (
        client.stream("POST", "/v1/completions", json=body) as response,
        aclosing(response.aiter_lines()) as lines,
    ):
        async for line in lines:
            if line.startswith(":"):  # a comment: the stream was silent for a while
                continue
            field, _, value = line.partition(": ")
            assert field in ("data", ""), "an event of a plain stream is its data alone"
            if line == "data: [DONE]":
                is_done = True
            elif field == "data":
                begun.set()
                [choice] = json.loads(value)["choices"]
                events[choice["index"]].append(choice)
    assert is_done
    return events


def test_a_reader_passes_by_the_comments_of_a_silent_stream() -> None:
    data = b'data: {"choices": [{"index": 0}]}\n\n'
    stream = KEEP_ALIVE + AFTER_KEEP_ALIVE + data + b"data: [DONE]\n\n"

    async def read() -> Events:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=stream))
        async with httpx.AsyncClient(base_url="http://test", transport=transport) as client:
            return await events_of(client, {"n": 1, "stream": True}, asyncio.Event())

    assert asyncio.run(read()) == {0: [{"index": 0}]}


async def all_events(url: httpx.URL, bodies: list[dict[str, Any]], harm: Harm | None = None) -> list[Events]:
    """Run bodies at once and return their events; do harm once all streams run."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client, asyncio.TaskGroup() as group:
        begun = [asyncio.Event() for _ in bodies]
        tasks = [group.create_task(events_of(client, *pair)) for pair in zip(bodies, begun, strict=True)]
        if harm is not None:
            for event in begun:
                await event.wait()
            await harm(client)
    return [task.result() for task in tasks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "num_clients"),
    [
        (signal.SIGKILL, 8),
        pytest.param(signal.SIGKILL, 32, marks=pytest.mark.slow),
        pytest.param(signal.SIGSEGV, 32, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 32, marks=pytest.mark.slow),
    ],
)
def test_clients_notice_nothing(launch: Launch, gate: EngineGate, number: signal.Signals, num_clients: int) -> None:
    bodies = BODIES[:num_clients]
    server = launch(*(("--engine-stall-timeout", "5") if number == signal.SIGSTOP else ()))

    async def signal_the_engine(client: httpx.AsyncClient) -> None:
        gate.shut_to_new()
        server.engine().send_signal(number)
        line = await asyncio.to_thread(server.wait_for_line, "restarting it; live requests: ")
        assert int(line.rpartition(" ")[2]) > num_clients // 2, "it died too late"
        assert (await client.get("/ready")).json()["error"]["code"] == "engine_restarting"
        assert (await client.get("/health")).status_code == 200
        gate.open()

    with server.wait_until_ready() as client:
        undisturbed = asyncio.run(all_events(client.base_url, bodies))
        gate.shut()
        assert asyncio.run(all_events(client.base_url, bodies, signal_the_engine)) == undisturbed
        kind = "stalled" if number == signal.SIGSTOP else "killed"
        assert f'kind="{kind}",model_name="storyteller"}} 1.0' in client.get("/metrics").text
        assert client.get("/ready").status_code == 200
    server.wait_for_line("the engine is ready again")
    cause = "the engine made no step for 5 s" if number == signal.SIGSTOP else f"was killed by signal {number.value}"
    assert cause in "".join(server.lines)
    assert all(
        min(map(len, events.values())) > 200 for events, body in zip(undisturbed, bodies, strict=True) if body["stream"]
    )


@pytest.mark.slow
def test_a_poison_gets_status_500_and_its_31_neighbours_what_they_asked_for(launch: Launch) -> None:
    server = launch()
    with server.wait_until_ready() as client:
        undisturbed = asyncio.run(all_events(client.base_url, BODIES))

        async def poisoned() -> tuple[httpx.Response, list[Events]]:
            body = {"prompt": POISON, "max_tokens": 5}
            async with httpx.AsyncClient(base_url=client.base_url, timeout=LIMIT_S) as poisoner:
                neighbours = asyncio.create_task(all_events(client.base_url, BODIES))
                return await poisoner.post("/v1/completions", json=body), await neighbours

        response, found = asyncio.run(poisoned())
        assert found == undisturbed
        assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
        assert "choice 0: the engine died each time it computed this request" in response.json()["error"]["message"]
        assert client.get("/ready").status_code == 200
