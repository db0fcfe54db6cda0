"""Idempotency-Key over a FakeEngineClient: however often a request is sent, it is computed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.engine.request import DRAWN_SEED_LIMIT, FinishReason, TokenOutput
from gptserve.server.jobs.job import BackgroundRequest
from tests.server.api.test_background import CHAT, cancel, get, num, post, split, step
from tests.server.api.test_completions import Events, send_raw
from tests.server.conftest import LiveServer
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient, say

Serve = Callable[..., LiveServer]
KEY = {"idempotency-key": "my key"}


def test_a_retry_gets_the_same_completion(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    first = post(server, KEY, max_tokens=5)
    again = post(server, KEY, max_tokens=5)
    another = post(server, {"idempotency-key": "another"}, max_tokens=5)
    assert first.status_code == 200
    assert first.json()["choices"][0]["text"] == "abcab"
    assert "status" not in first.json(), "it is the answer to a plain request"
    assert again.json() == first.json()
    assert another.json()["id"] != first.json()["id"]
    assert len(server.engine.submitted) == 2
    assert get(server, first.json()["id"]).json() == first.json() | {"status": "completed", "error": None}


def test_the_spelling_of_a_body_makes_no_difference(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    headers = KEY | {"content-type": "application/json"}
    ids = [
        httpx.post(server.url + "/v1/completions", content=content.encode(), headers=headers, timeout=20).json()["id"]
        for content in ('{"prompt": "\\u00e9", "n": 1}', ' {"n":1,\n"prompt":"é"}')
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("body", [{}, CHAT])
def test_a_retry_of_a_stream_gets_its_events_from_the_start_or_from_where_it_was(
    serve: Serve, body: dict[str, Any]
) -> None:
    server = serve(FakeEngineClient())
    body = {**body, "stream": True, "max_tokens": 5}
    first = post(server, KEY, **body).text
    assert post(server, KEY, **body).text == first
    num_openings = len(split(first)) - 6
    assert split(post(server, KEY | {"last-event-id": "2"}, **body).text) == split(first)[2 + num_openings :]
    assert post(server, KEY | {"last-event-id": "5"}, **body).status_code == 204
    refused = post(server, KEY | {"last-event-id": "two"}, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert len(server.engine.submitted) == 1


def test_a_retry_that_has_events_of_a_completion_nobody_knows_any_more_goes_on_where_it_was(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    headers, body = KEY | {"last-event-id": "2"}, {"stream": True, "max_tokens": 5}
    rest = split(post(server, headers, **body).text)
    assert [event.partition("\n")[0] for event in rest] == ["id: 3", "id: 4", "id: 5", "data: [DONE]"]
    refused = post(server, {"idempotency-key": "b", "last-event-id": "6"}, **body)
    assert (refused.status_code, len(server.engine.submitted)) == (400, 1)


@pytest.mark.parametrize("seedless", [{}, {"seed": -1}])
def test_a_lost_completion_begins_again_with_the_seed_that_its_key_stands_for(
    serve: Serve, seedless: dict[str, Any]
) -> None:
    def seeds(*headers: dict[str, str], **body: Any) -> list[int]:
        server = serve(FakeEngineClient(), api_keys=("of-a", "of-b"))
        return [post(server, h, **seedless | body).json()["seed"] for h in headers]

    of_a, of_b = ({"authorization": f"Bearer {key}"} for key in ("of-a", "of-b"))
    [seed] = seeds(KEY | of_a)
    assert seeds(KEY | of_a) == [seed], "another server has the same"
    assert 0 <= seed < DRAWN_SEED_LIMIT
    others = seeds({"idempotency-key": "another"} | of_a, KEY | of_b, of_a, of_a) + seeds(KEY | of_a, max_tokens=5)
    assert len({seed, *others}) == 6, "the seed is of the key, its owner and the request"
    assert seeds(KEY | of_a, seed=7) == [7]


@pytest.mark.parametrize(
    ("lacks", "batch_invariant", "why"),
    [
        ("seed", True, "without a seed a new one has other tokens"),
        ("", False, "a new one may have other tokens, as batch_invariant is false"),
    ],
)
def test_a_stream_does_not_go_on_in_a_completion_that_may_be_another(
    serve: Serve, lacks: str, batch_invariant: bool, why: str
) -> None:
    engine = FakeEngineClient(info=replace(INFO, batch_invariant=batch_invariant))
    server = serve(engine)
    body = {"stream": True, "background": True, "seed": 7}
    body.pop(lacks, None)
    refused = post(server, {"last-event-id": "2"}, **body)
    assert (refused.status_code, refused.json()["error"]) == (
        404,
        {
            "message": f"the completion of Last-Event-ID 2 is unknown, and {why}; "
            "leave Last-Event-ID out to begin a new one",
            "type": "invalid_request_error",
            "param": "Last-Event-ID",
            "code": "completion_not_found",
        },
    )
    assert engine.submitted == []
    assert post(server, {"last-event-id": "0"}, **body).status_code == 200, "who has nothing may have any"


def test_a_retry_does_not_go_on_in_the_text_of_another_model(serve: Serve, tmp_path: Path) -> None:
    engine, body = FakeEngineClient(auto=False), {"prompt": "x", "stream": True, "max_tokens": 5}
    first = LiveServer(engine, state_dir=tmp_path)
    with (
        first.running(),
        httpx.stream("POST", f"{first.url}/v1/completions", json=body, headers=KEY, timeout=20) as response,
    ):
        events = Events(response)
        engine.from_outside(engine.step)
        assert events.next_text() == "a"
    other = FakeEngineClient(info=replace(INFO, fingerprint="other"))
    second = serve(other, state_dir=tmp_path)
    refused = post(second, KEY | {"last-event-id": "1"}, **body)
    assert (refused.status_code, refused.headers["x-should-retry"], refused.json()["error"]) == (
        500,
        "false",
        {
            "message": "the completion of Last-Event-ID 1 was computed by another model; "
            "leave Last-Event-ID out to begin a new one",
            "type": "server_error",
            "param": "Last-Event-ID",
            "code": "model_changed",
        },
    )
    assert other.submitted == []
    assert num(post(second, KEY, **body).text) == 5


def test_a_retry_of_a_background_completion_is_told_where_it_is(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    first = post(server, KEY, background=True, max_tokens=1)
    step(engine)
    get(server, first.json()["id"], "/events")
    again = post(server, KEY, background=True, max_tokens=1)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json() | {"status": "completed"}
    assert len(engine.submitted) == 1


@pytest.mark.parametrize("other", [{"max_tokens": 6}, {"stream": True}, {"user": "me"}, {"guided_regex": "a"}, CHAT])
def test_another_request_with_the_same_key_is_refused(serve: Serve, other: dict[str, Any]) -> None:
    server = serve(FakeEngineClient())
    post(server, KEY, max_tokens=5)
    refused = post(server, KEY, **{"max_tokens": 5, **other})
    assert refused.status_code == 409
    assert refused.json()["error"] == {
        "message": "Idempotency-Key 'my key' was used with another request",
        "type": "invalid_request_error",
        "param": "Idempotency-Key",
        "code": "idempotency_key_reused",
    }
    assert len(server.engine.submitted) == 1


@pytest.mark.parametrize("key", ["", "a" * 257, "é", "a\tb"])
def test_a_bad_key_is_refused(serve: Serve, key: str) -> None:
    server = serve(FakeEngineClient())
    refused = post(server, {b"idempotency-key": key.encode("latin-1")})  # type: ignore[dict-item]
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith("Idempotency-Key must be 1 to 256 printable ASCII characters, got ")
    assert (error["param"], error["code"]) == ("Idempotency-Key", "invalid_value")
    assert server.engine.submitted == []


def test_requests_of_the_same_instant_make_one_completion(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is tokenized, beside the event loop, until all have come; one of another body is among them."""
    num_requests, came, asked = 8, threading.Event(), []
    encode, make = ByteTokenizer.encode_with_special, BackgroundRequest.of

    def encode_late(self: ByteTokenizer, text: str, *, template: bool = False) -> list[int]:
        assert came.wait(20)
        return encode(self, text, template=template)

    def count(*arguments: Any) -> BackgroundRequest:
        asked.append(make(*arguments))
        if len(asked) > num_requests:
            came.set()
        return asked[-1]

    server = serve(FakeEngineClient(info=replace(INFO, max_model_len=10_000)))
    monkeypatch.setattr(ByteTokenizer, "encode_with_special", encode_late)
    monkeypatch.setattr(BackgroundRequest, "of", count)
    bodies = [{"prompt": "x" * 3000}] * num_requests + [{"prompt": "y" * 3000}]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(server, KEY, **body), bodies))
    statuses = [answer.status_code for answer in answers]
    assert len(server.engine.submitted) == 1
    assert sorted(statuses) in ([200] * num_requests + [409], [200] + [409] * num_requests)
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 200}) == 1


def test_a_large_request_is_compared_beside_the_event_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, make = [], BackgroundRequest.of

    def spy(*arguments: Any) -> BackgroundRequest:
        threads.append(threading.get_ident())
        return make(*arguments)

    monkeypatch.setattr(BackgroundRequest, "of", spy)
    server = serve(FakeEngineClient())
    for size, status in ((2**16, 400), (1, 200)):
        assert post(server, KEY, prompt="x" * size).status_code == status
    server.engine.from_outside(lambda: threads.append(threading.get_ident()))
    step(server.engine)
    of_large, of_small, loop = threads
    assert of_large != loop == of_small


def test_a_keyed_completion_goes_on_when_its_client_hangs_up_and_the_retry_finds_it(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    client = send_raw(server, "idempotency-key: my key\r\n", max_tokens=3)
    engine.wait_for(lambda: len(engine.submitted) == 1)
    step(engine)
    client.close()
    with ThreadPoolExecutor(1) as pool:
        retry = pool.submit(post, server, KEY, max_tokens=3)
        step(engine)
        step(engine)
        answer = retry.result(20).json()
    assert answer["choices"][0]["text"] == "abc"
    assert (len(engine.submitted), engine.aborted) == (1, [])


@pytest.mark.parametrize("refusal", [{"temperature": 9.0}, {"n": 100}])
def test_a_refused_request_leaves_its_key_free(serve: Serve, refusal: dict[str, Any]) -> None:
    engine = FakeEngineClient()
    engine.max_requests = 50
    server = serve(engine)
    assert post(server, KEY, **refusal).status_code in (400, 429)
    assert post(server, KEY).status_code == 200


def test_a_completion_that_failed_leaves_its_key_free_so_that_a_retry_computes(serve: Serve) -> None:
    def fail(request: Any) -> Any:
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="out of memory")

    engine = FakeEngineClient(fail)
    server = serve(engine)
    failed = post(server, KEY)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "generation_failed")
    engine.reply = say("abc")
    assert post(server, KEY, max_tokens=3).json()["choices"][0]["text"] == "abc"


def test_a_cancelled_completion_is_not_computed_again(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    completion_id = post(server, KEY, background=True, stream=False).json()["id"]
    assert cancel(server, completion_id).json()["status"] == "cancelled"
    assert post(server, KEY, background=True, stream=False).json()["status"] == "cancelled"


@pytest.mark.parametrize("durable", [True, False])
def test_a_key_outlives_the_server_with_its_journal(serve: Serve, durable: bool, tmp_path: Path) -> None:
    folder = tmp_path if durable else None
    first = LiveServer(FakeEngineClient(), state_dir=folder)
    with first.running():
        answer = post(first, KEY, max_tokens=5).json()
    second = serve(FakeEngineClient(), state_dir=folder)
    again = post(second, KEY, max_tokens=5).json()
    assert (again == answer) is durable
    assert len(second.engine.submitted) == (0 if durable else 1)
    assert num(get(second, again["id"], "/events").text) == 5
