"""Streams through Ray Serve go on when an engine, a node or a server is killed. A real cluster, on this machine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from bench.ray_chaos import ARGUMENTS, TWO, cluster, compute_alone, make_catalogue, run_kills
from bench.ray_chaos import Tally as Seen
from bench.ray_nodes import LIMIT_S, RayNodes

NUM_CLIENTS = 16  # each kind of stream with a key and without one
MANY = 40


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster(TWO, 3) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def client(nodes: RayNodes) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=nodes.url, timeout=LIMIT_S, limits=limits) as client:
        yield client


def metric(client: httpx.Client, name: str) -> float:
    """Return a number of whichever server answers."""
    found = re.search(rf"^gptserve_{name}(?:\{{.*\}})? (.+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_client_that_hangs_up_ends_what_engines_compute_for_it(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1000, "n": MANY, "ignore_eos": True, "stream": True}
    before = metric(client, "generation_tokens_total")
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        wait_until(lambda: metric(client, "num_requests_running") == MANY)
    wait_until(lambda: [metric(client, "num_requests_running") for _ in range(8)] == [0] * 8)  # both servers say so
    assert metric(client, "generation_tokens_total") - before < MANY * 1000 / 2


@pytest.mark.slow
def test_what_a_server_cannot_take_is_refused_and_its_models_are_listed(client: httpx.Client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert model["id"] == "storyteller"
    num, room = 100, ARGUMENTS["max-num-seqs"] + ARGUMENTS["max-num-queued-reqs"]
    body = {"prompt": "x", "max_tokens": 400, "n": num, "ignore_eos": True, "stream": True}
    with ExitStack() as streams:
        for _ in range(2 * (room // num) + 1):  # what two servers have room for, and one more
            response = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
            if response.status_code != 200:
                break
        assert response.status_code == 429
        message = f"the queue is full: at most {room} requests may run or wait, {room // num * num} do, got {num} more"
        assert json.loads(response.read())["error"]["message"] == message
        assert "Retry-After" in response.headers
    assert client.post("/v1/completions", json={"prompt": "x", "temperature": -1}).status_code == 400


@pytest.mark.slow
def test_requests_wait_while_no_engine_runs_and_readiness_says_so(nodes: RayNodes, client: httpx.Client) -> None:
    for _ in range(2):
        nodes.kill("Engine")
    wait_until(lambda: client.get("/ready").status_code == 503)
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    nodes.heal("Engine", 2)
    wait_until(lambda: [client.get("/ready").status_code for _ in range(8)] == [200] * 8)


@pytest.mark.slow
def test_streams_go_on_whatever_is_killed(nodes: RayNodes) -> None:
    async def test() -> Seen:
        catalogue, seen = make_catalogue(NUM_CLIENTS), Seen()
        await compute_alone(nodes, catalogue)
        await run_kills(nodes, catalogue, seen, ["engine", "node", "server"], seed=0)
        return seen

    seen = asyncio.run(test())
    assert seen.wrong == []
    assert {seen.counts[f"{what}s killed"] for what in ("engine", "node", "server")} == {1}
