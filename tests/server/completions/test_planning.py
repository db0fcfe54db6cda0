"""What is counted, bounded and in turns while requests are planned, over a tokenizer that waits for the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from gptserve.server.api.completions import THREAD_BYTES
from gptserve.server.completions.planning import MAX_PLANNING_BYTES, Place, Planning
from gptserve.server.core.errors import ServiceError
from gptserve.server.jobs.job import BackgroundRequest
from gptserve.weights.workers import NUM_WORKERS
from tests.server.conftest import LiveServer
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient

WAITING = "gptserve_num_requests_waiting"
KEYS = {"alice": "a", "bob": "b"}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": "x", "background": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/responses", {"input": "x", "store": False}),
]
KEPT = [way for way in WAYS if "background" in way[1] or way == ("/v1/responses", {"input": "x"})]
LARGE = {"padding": "x" * THREAD_BYTES}


class GatedTokenizer(ByteTokenizer):
    """Waits with each text until the gate is open, but for those that are free; `entered` has the texts."""

    has_workers = True

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered: list[str] = []
        self._changed = threading.Condition()

    def encode(self, text: str) -> list[int]:
        self._wait(text)
        return super().encode(text)

    def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
        self._wait(text)
        return super().encode_with_special(text, template=template)

    def wait_for(self, num_entered: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.entered) >= num_entered, 20), self.entered

    def _wait(self, text: str) -> None:
        with self._changed:
            self.entered.append(text)
            self._changed.notify_all()
        assert self.gate.wait(60)


class Gated:
    """A server whose requests stay in their planning until the gate of `tokenizer` opens."""

    def __init__(self, server: LiveServer, tokenizer: GatedTokenizer, pool: ThreadPoolExecutor) -> None:
        self.server, self.tokenizer, self._pool = server, tokenizer, pool

    def post(
        self, owner: str | None = None, path: str = "/v1/completions", *, retry_key: str | None = None, **body: Any
    ) -> httpx.Response:
        headers = {} if owner is None else {"authorization": f"Bearer {KEYS[owner]}"}
        headers |= {} if retry_key is None else {"idempotency-key": retry_key}
        body = {"prompt": "x", **body} if path == "/v1/completions" else body
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=60)

    def begin(self, *arguments: Any, **body: Any) -> Future[httpx.Response]:
        """Post in another thread; return once all that were begun so are being planned."""
        return self._pool.submit(self.post, *arguments, **body)

    def wait_for_waiting(self, number: int) -> None:
        while self.server.metric(WAITING) != number:
            pass  # each look is a request; the time limit of tests ends it


@pytest.fixture
def gated(serve: Callable[..., LiveServer], tmp_path: Path) -> Iterator[Callable[..., Gated]]:
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(32))

        def make(*, keys: bool = False, **options: Any) -> Gated:
            tokenizer = GatedTokenizer()
            if keys:
                (tmp_path / "keys").write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
                options["api_key_file"] = tmp_path / "keys"
            tokenizer.gate.set()
            server = serve(FakeEngineClient(), tokenizer=tokenizer, **options)
            tokenizer.gate.clear()
            tokenizer.entered.clear()
            stack.callback(tokenizer.gate.set)
            return Gated(server, tokenizer, pool)

        yield make


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


@pytest.mark.some(2)
@pytest.mark.parametrize(("num_cpus", "share"), [(1, 1), (2, 1), (3, 2), (64, NUM_WORKERS - 1)])
def test_a_flood_of_one_key_leaves_a_worker_to_the_others(
    gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch, num_cpus: int, share: int
) -> None:
    monkeypatch.setattr("gptserve.server.completions.planning.usable_cpus", lambda: num_cpus)
    gate = gated(keys=True)
    flood = [gate.begin("alice", prompt="a") for _ in range(12)]
    gate.wait_for_waiting(12)
    gate.tokenizer.wait_for(share)
    assert gate.tokenizer.entered == ["a"] * share
    other = gate.begin("bob", prompt="b")
    gate.tokenizer.wait_for(share + 1)
    assert gate.tokenizer.entered == ["a"] * share + ["b"], "while all of the flood still run or wait"
    gate.tokenizer.gate.set()
    assert [answer.result().status_code for answer in (*flood, other)] == [200] * 13


def test_without_other_owners_all_workers_are_used(gated: Callable[..., Gated]) -> None:
    gate = gated()
    answers = [gate.begin() for _ in range(NUM_WORKERS + 3)]
    gate.wait_for_waiting(NUM_WORKERS + 3)
    gate.tokenizer.wait_for(NUM_WORKERS)
    assert len(gate.tokenizer.entered) == NUM_WORKERS
    gate.tokenizer.gate.set()
    assert {answer.result().status_code for answer in answers} == {200}
    gate.wait_for_waiting(0)


@pytest.mark.some(2)
@pytest.mark.parametrize(("path", "body"), WAYS)
def test_a_request_counts_for_its_key_before_it_is_planned(
    gated: Callable[..., Gated], path: str, body: dict[str, Any]
) -> None:
    gate = gated(keys=True, max_requests_per_key=1)
    first = gate.begin("alice", path, **body)
    gate.tokenizer.wait_for(1)
    assert gate.server.metric(WAITING) == 1
    refused = gate.post("alice", path, **body)
    message = "key 'alice' may have at most 1 requests running or queued: 1 active, got 1 more"
    assert error_of(refused) == (429, "rate_limit_exceeded", message)
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(gate.tokenizer.entered) == 1, "nothing was done for the one that is refused"
    gate.tokenizer.gate.set()
    assert first.result().status_code in (200, 202)
    assert gate.post("bob", path, **body).status_code in (200, 202)
    gate.server.wait_until_idle()
    assert gate.post("alice", path, **body).status_code in (200, 202)
    assert gate.server.metric(WAITING) == 0


@pytest.mark.parametrize("retry_key", [None, "k"])
@pytest.mark.parametrize(("path", "body"), KEPT)
def test_a_large_request_that_is_kept_waits_for_nothing_before_it_counts(
    gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], retry_key: str | None
) -> None:
    gate, is_computing = gated(keys=True, max_requests_per_key=1), threading.Event()

    def compute(*_: Any) -> Response:
        is_computing.set()
        assert gate.tokenizer.gate.wait(60)
        return Response()

    monkeypatch.setattr("gptserve.server.api.tokenize._detokenize", compute)
    other = gate.begin("bob", "/detokenize", tokens=[1])
    assert is_computing.wait(20)
    first = gate.begin("alice", path, retry_key=retry_key, **body, **LARGE)
    gate.tokenizer.wait_for(1)
    assert gate.server.metric(WAITING) == 1
    refused = gate.post("alice", path, retry_key=retry_key and "another", **body, **LARGE)
    assert error_of(refused)[:2] == (429, "rate_limit_exceeded")
    gate.tokenizer.gate.set()
    assert [answer.result().status_code // 100 for answer in (other, first)] == [2, 2]


@pytest.mark.some(1)
@pytest.mark.parametrize(("path", "body"), [*KEPT, ("/v1/completions", {})])
def test_a_large_request_with_a_key_counts_and_takes_its_turn_before_it_is_compared(
    gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    gate, compare, is_comparing = gated(keys=True, max_requests_per_key=1), BackgroundRequest.of, threading.Event()

    def compare_late(*arguments: Any) -> BackgroundRequest:
        is_comparing.set()
        assert gate.tokenizer.gate.wait(60)
        return compare(*arguments)

    gate.tokenizer.gate.set()
    done = gate.post("alice", path, retry_key="done", **body, **LARGE).json()
    gate.server.wait_until_idle()
    gate.tokenizer.gate.clear()
    monkeypatch.setattr(BackgroundRequest, "of", compare_late)
    first = gate.begin("alice", path, retry_key="new", **body, **LARGE)
    assert is_comparing.wait(20)
    assert gate.server.metric(WAITING) == 1
    message = "key 'alice' may have at most 1 requests running or queued: 1 active, got 1 more"
    refused = gate.post("alice", path, retry_key="another", **body, **LARGE)
    assert error_of(refused) == (429, "rate_limit_exceeded", message)
    assert gate.post("bob", "/detokenize", tokens=[65]).json() == {"prompt": "A"}
    if path != "/v1/responses":
        late = gate.post("bob", path, retry_key="late", timeout_ms=1, **body, **LARGE)
        assert error_of(late) == (503, "queue_timeout", "timeout_ms: the request was still being prepared after 1 ms")
    retry = gate.begin("alice", path, retry_key="done", **body, **LARGE)
    gate.tokenizer.gate.set()
    assert retry.result().json()["id"] == done["id"], "a retry begins nothing, so the limit is not for it"
    assert first.result().status_code in (200, 202)
    gate.wait_for_waiting(0)


def test_the_choices_of_all_that_are_planned_fill_the_queue(gated: Callable[..., Gated]) -> None:
    gate = gated()
    gate.server.engine.max_requests = 4
    first = gate.begin(prompt=["a", "b"], n=2)
    gate.tokenizer.wait_for(1)
    assert gate.server.metric(WAITING) == 4
    assert error_of(gate.post()) == (429, "queue_full", "the queue is full")
    assert (
        'rejections_total{code="queue_full",model_name="test-model"} 1.0'
        in httpx.get(gate.server.url + "/metrics", timeout=20).text
    )
    gate.tokenizer.gate.set()
    assert first.result().status_code == 200


@pytest.mark.parametrize(("path", "body"), WAYS[:3])
def test_the_time_limit_of_a_request_counts_while_it_is_planned(
    gated: Callable[..., Gated], path: str, body: dict[str, Any]
) -> None:
    gate = gated()
    late = gate.post(None, path, **body, timeout_ms=1)
    assert error_of(late) == (503, "queue_timeout", "timeout_ms: the request was still being prepared after 1 ms")
    assert late.headers["retry-after"] == "5"
    assert (gate.server.metric(WAITING), gate.server.engine.submitted) == (0, [])
    metrics = httpx.get(gate.server.url + "/metrics", timeout=20).text
    assert 'admission_rejections_total{code="queue_timeout",model_name="test-model"} 1.0' in metrics
    gate.tokenizer.gate.set()
    assert gate.post(None, path, **body).status_code in (200, 202)


def test_who_waits_too_long_for_a_turn_gets_503_and_who_gets_one_at_once_does_not() -> None:
    planning, gate = Planning(max_queue_time_s=0.001), threading.Event()

    async def call() -> None:
        running = [asyncio.create_task(planning.run(Place(started_at=0), gate.wait, 60)) for _ in range(NUM_WORKERS)]
        try:
            await asyncio.sleep(0)
            with pytest.raises(ServiceError, match=r"^the request was not admitted within 0\.001 s$") as caught:
                await planning.run(Place(), lambda: "never called")
            assert caught.value.code == "queue_timeout"
        finally:
            gate.set()
        assert await asyncio.gather(*running) == [True] * NUM_WORKERS
        assert await planning.run(Place(started_at=0), lambda: "done") == "done"

    asyncio.run(asyncio.wait_for(call(), 60))


@pytest.mark.some(3)
@pytest.mark.parametrize(("path", "body"), [*WAYS, ("/tokenize", {"prompt": "x"})])
def test_a_client_that_hangs_up_gives_up_its_place(
    gated: Callable[..., Gated], path: str, body: dict[str, Any]
) -> None:
    gate = gated()
    running = [gate.begin() for _ in range(NUM_WORKERS)]
    gate.tokenizer.wait_for(NUM_WORKERS)
    content = httpx.Request("POST", "http://x", json=body).content
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", gate.server.port), 20) as client:
        client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        if path != "/tokenize":
            gate.wait_for_waiting(NUM_WORKERS + 1)
    gate.wait_for_waiting(NUM_WORKERS)
    gate.tokenizer.gate.set()
    assert [answer.result().status_code for answer in running] == [200] * NUM_WORKERS
    gate.wait_for_waiting(0)
    assert gate.post().status_code == 200
    assert gate.tokenizer.entered == ["x"] * (NUM_WORKERS + 1), "nothing was done for the client that is gone"


def test_what_is_held_for_requests_that_are_planned_is_bounded(
    gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptserve.server.completions.planning.MAX_PLANNING_BYTES", 1000)
    gate = gated(keys=True)
    size = len(httpx.Request("POST", "http://x", json={"prompt": "x", "padding": ""}).content)
    large = {"padding": "x" * (600 - size)}
    first = gate.begin("alice", **large)
    gate.tokenizer.wait_for(1)
    refused = gate.post("alice")
    message = "requests of a key that are being prepared may have 500 bytes: those of 'alice' have 600, got 14 more"
    assert error_of(refused) == (429, "rate_limit_exceeded", message)
    second = gate.begin("bob", **large)
    gate.wait_for_waiting(2)
    refused = gate.post("bob")
    message = "requests that are being prepared may have 1000 bytes: they have 1200, got 14 more"
    assert error_of(refused) == (429, "queue_full", message)
    assert refused.headers["retry-after"] == "1"
    gate.tokenizer.gate.set()
    assert [first.result().status_code, second.result().status_code] == [200, 200]
    assert gate.post("alice").status_code == 200


def test_one_request_of_an_owner_may_be_of_any_size() -> None:
    planning, place, second = Planning(lambda: True), Place("alice"), Place("alice")
    planning.enter(place)
    planning.hold(place, MAX_PLANNING_BYTES)
    planning.hold(place, MAX_PLANNING_BYTES)  # as its conversation has so many
    planning.enter(second)
    with pytest.raises(ServiceError):
        planning.hold(second, 1)
    assert planning.leave(place)
    assert not planning.leave(place)
    planning.hold(second, MAX_PLANNING_BYTES)
