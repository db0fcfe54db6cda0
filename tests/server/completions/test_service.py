from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from gptserve.server.completions.model import ModelRegistry
from gptserve.server.completions.service import Service
from gptserve.server.core.lifecycle import Lifecycle
from gptserve.server.core.metrics import Metrics
from gptserve.weights.workers import NUM_WORKERS
from tests.server.app_options import model_and_options
from tests.server.conftest import Api
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient


def test_a_full_queue_is_a_429_that_says_when_to_come_back(api: Api) -> None:
    api.engine.max_requests = 1
    response = api.complete(prompt=["a", "b"])
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"] == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    assert api.engine.submitted == [], "all choices are queued or none"
    assert api.complete(prompt="a").status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ready", 503), ("/v1/models", 200)])
def test_a_draining_server_lives_but_is_not_ready(api: Api, path: str, status: int) -> None:
    api.app.state.lifecycle.drain()
    assert api.get(path).status_code == status


@pytest.mark.parametrize("stream", [True, False])
def test_a_draining_server_lets_no_completion_in(api: Api, stream: bool) -> None:
    api.app.state.lifecycle.drain()
    response = api.complete(prompt="a", stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert response.json()["error"]["code"] == "draining"
    assert api.engine.submitted == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_without_an_engine_nothing_is_well(make_api: Callable[..., Api], path: str) -> None:
    api = make_api(FakeEngineClient())
    api.engine.die()
    response = api.get(path)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert response.json()["error"] == {
        "message": "no engine is running: it is loading or has died",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
    }
    assert api.complete(prompt="a").status_code == 503


def test_calls_that_wait_for_workers_leave_threads_to_others() -> None:
    engine = FakeEngineClient()
    model, options = model_and_options(engine, ByteTokenizer())
    service = Service(ModelRegistry(model), options, Lifecycle(), Metrics(engine, "m"))
    entered, gate = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        entered.release()
        assert gate.wait(60)

    async def call() -> None:
        calls = [asyncio.create_task(service.in_worker(wait)) for _ in range(NUM_WORKERS + 20)]
        try:
            for _ in range(NUM_WORKERS):
                assert await asyncio.to_thread(entered.acquire, timeout=60)
            assert await service.in_thread(lambda: "done") == "done"
            assert not entered.acquire(blocking=False)
        finally:
            gate.set()
        await asyncio.gather(*calls)

    asyncio.run(asyncio.wait_for(call(), 60))
