from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gptserve.engine.process.client import TokenStream
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.limits import KeyLimits
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import FakeEngineClient, say


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(limits: KeyLimits, owner: str, num_requests: int = 1) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        limits.check(owner, num_requests)
    assert caught.value.code == "rate_limit_exceeded"
    return caught.value


def test_requests_count_until_each_of_them_ends() -> None:
    limits = KeyLimits(max_requests=lambda: 3)
    stream = TokenStream(("a", "b", "c"), lambda _: None)
    limits.check("alice", 3)
    limits.begin("alice", stream)

    assert (
        str(refusal(limits, "alice"))
        == "key 'alice' may have at most 3 requests running or queued: 3 active, got 1 more"
    )
    limits.check("bob", 3)
    stream.push(TokenOutput("a", (1,), finish_reason=FinishReason.STOP))
    limits.check("alice", 1)
    assert str(refusal(limits, "alice", 2)).endswith(": 2 active, got 2 more")
    stream.abort()
    limits.check("alice", 3)


def test_a_stream_that_is_forgotten_counts_no_more() -> None:
    limits = KeyLimits(max_requests=lambda: 1)
    limits.begin("alice", TokenStream(("a",), lambda _: None))
    limits.check("alice", 1)


def test_tokens_of_a_minute_come_back_evenly() -> None:
    clock = Clock()
    limits = KeyLimits(max_tokens_per_minute=60, clock=clock)
    limits.check("alice", 1)
    limits.charge("alice", 69)

    error = refusal(limits, "alice")
    assert (str(error), error.retry_after_s) == ("a key may use 60 tokens a minute: 'alice' may again in 10 s", 10)
    limits.check("bob", 1)
    clock.now += 9.5
    assert refusal(limits, "alice").retry_after_s == 1
    clock.now += 0.5
    limits.check("alice", 1)
    clock.now += 3600
    assert dict(limits.headers("alice"))[b"x-ratelimit-remaining-tokens"] == b"60", "a bucket holds a minute at most"


def test_without_limits_or_without_keys_everything_is_let_in() -> None:
    for limits, owner in ((KeyLimits(), "alice"), (KeyLimits(lambda: 1, 1), None)):
        limits.charge(owner, 10**9)
        limits.check(owner, 10**6)
        assert limits.headers(owner) == []


def test_a_key_gets_429_and_what_it_has_left(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), api_keys=("k",), max_tokens_per_minute_per_key=100, max_requests_per_key=4)

    def post(**body: Any) -> httpx.Response:
        headers = {"authorization": "Bearer k"}
        return api.request("POST", "/v1/completions", json={"prompt": "abc", **body}, headers=headers)

    served, last, refused = post(max_tokens=7), post(max_tokens=90, n=2), post()
    assert [response.status_code for response in (served, last, refused)] == [200, 200, 429]
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) in range(1, 60)
    left = {name.removeprefix("x-ratelimit-"): value for name, value in refused.headers.items() if "ratelimit" in name}
    assert left.pop("reset-tokens").endswith("s")
    assert left == {
        **{"limit-requests": "4", "remaining-requests": "4", "limit-tokens": "100", "remaining-tokens": "0"},
    }
    rejections = 'gptserve_admission_rejections_total{code="rate_limit_exceeded",model_name="test-model"} 1.0'
    assert rejections in api.get("/metrics").text


def test_what_a_key_can_never_have_at_once_is_no_reason_to_try_again(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), api_keys=("k",), max_requests_per_key=4)
    headers = {"authorization": "Bearer k"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body, times in (
        ("/v1/completions", {"prompt": "x", "n": 5}, "5 times 1"),
        ("/v1/completions", {"prompt": ["x"] * 5}, "1 times 5"),
        ("/v1/completions", {"prompt": "x", "n": 5, "background": True}, "5 times 1"),
        ("/v1/chat/completions", {**chat, "n": 5}, "5 times 1"),
    ):
        refused = api.request("POST", path, json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]) == (
            400,
            {
                "message": f"n times the number of prompts may be at most 4 with this key, got {times}",
                "type": "invalid_request_error",
                "param": "n",
                "code": "invalid_value",
            },
        )
        assert "retry-after" not in refused.headers
    assert api.request("POST", "/v1/completions", json={"prompt": "x", "n": 4}, headers=headers).status_code == 200


def test_a_prompt_is_charged_once_however_many_choices_it_has(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), api_keys=("k",), max_tokens_per_minute_per_key=1000)
    body = {"prompt": ["a" * 100, "b" * 50], "n": 4, "max_tokens": 2}
    answer = api.request("POST", "/v1/completions", json=body, headers={"authorization": "Bearer k"})
    assert answer.json()["usage"]["total_tokens"] == 150 + 16
    left = api.get("/v1/models", headers={"authorization": "Bearer k"}).headers["x-ratelimit-remaining-tokens"]
    assert int(left) >= 1000 - 150 - 16, "some have come back"


def test_no_key_fills_the_queue_for_others(serve: Callable[..., LiveServer], tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: a\nbob: b\n")
    engine = FakeEngineClient(say("abc"), auto=False)
    server = serve(engine, api_key_file=keys, max_choices=4096)

    def post(client: httpx.Client, key: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return client.post("/v1/completions", json={"prompt": "x", "background": True, **body}, headers=headers)

    with httpx.Client(base_url=server.url, timeout=20) as client:
        assert post(client, "a", n=128).status_code == 202
        refused, let_in = post(client, "a", n=33), post(client, "b", n=33)
    assert refused.json()["error"]["message"] == (
        "key 'alice' may have at most 160 requests running or queued: 128 active, got 33 more"
    )
    assert let_in.status_code == 202


@pytest.mark.parametrize("way", ["events", "retries"])
def test_no_key_opens_every_connection_as_readers(serve: Callable[..., LiveServer], tmp_path: Any, way: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: a\nbob: b\n")
    engine = FakeEngineClient(say("abc"), auto=False)
    server = serve(engine, api_key_file=keys, max_connections=8, max_requests_per_key=1)
    alice, bob = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    body = {"prompt": "x", "stream": True, "background": True}
    path = "/v1/completions"
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))

        def read(headers: dict[str, str]) -> httpx.Response:
            if way == "retries":
                return stack.enter_context(
                    client.stream("POST", path, json=body, headers={**headers, "idempotency-key": "k"})
                )
            return stack.enter_context(client.stream("GET", f"{path}/{completion_id}/events", headers=headers))

        completion_id = client.post(path, json={**body, "stream": False}, headers=alice).json()["id"]
        if way == "retries":
            client.post(f"{path}/{completion_id}/cancel", headers=alice)
        readers = [read(alice) for _ in range(4)]
        assert [reader.status_code for reader in readers] == [200] * 4
        refused = client.get(f"{path}/{completion_id}", headers=alice)
        assert (refused.status_code, refused.headers["retry-after"], refused.json()["error"]) == (
            429,
            "1",
            {
                "message": "key 'alice' may have at most 4 open answers: 4 are open",
                "type": "rate_limit_error",
                "param": None,
                "code": "rate_limit_exceeded",
            },
        )
        assert client.get("/v1/models", headers=bob).status_code == 200
        assert client.get("/health").status_code == 200
        readers[0].close()
        while (again := client.get(f"{path}/{completion_id}", headers=alice)).status_code == 429:
            pass  # until the server notices; the time limit of tests ends it
        assert again.status_code == 200


def test_the_only_key_may_open_all_connections(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(auto=False), api_keys=("k",), max_connections=8)
    headers = {"authorization": "Bearer k"}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
        body = {"prompt": "x", "stream": True}
        readers = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=body, headers=headers)) for _ in range(6)
        ]
        assert [reader.status_code for reader in readers] == [200] * 6


def test_a_key_without_others_may_have_the_whole_queue(make_api: Callable[..., Api], tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: old\nalice: new\n")  # in a rotation
    api = make_api(FakeEngineClient(), api_key_file=keys)
    answer = api.get("/v1/models", headers={"authorization": "Bearer new"})
    assert answer.status_code == 200
    assert "x-ratelimit-limit-requests" not in answer.headers
