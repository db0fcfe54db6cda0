from __future__ import annotations

import contextlib
import gzip
import json
import socket
from collections.abc import Callable

import httpx
import pytest

from gptserve.server.http.body import parse_json_object
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import FakeEngineClient

LIMIT = 2000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"


def received_until(client: socket.socket, end: bytes) -> bytes:
    """Return an answer, which may come in several pieces."""
    answer = client.recv(65536)
    while not answer.endswith(end):
        answer += client.recv(65536)
    return answer


def fits(size: int) -> bytes:
    """Return a valid body of `size` bytes."""
    body = json.dumps({"prompt": "x"}).encode()
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("content_type", ["text/plain", "application/jsonx", "multipart/form-data"])
def test_another_content_type_is_a_415(api: Api, content_type: str) -> None:
    response = api.request("POST", "/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json() == {
        "error": {
            "message": f"content-type must be application/json, got {content_type}",
            "type": "invalid_request_error",
            "param": None,
            "code": "unsupported_media_type",
        }
    }


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_name_its_charset(api: Api, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert api.request("POST", "/v1/completions", content=b'{"prompt":"x"}', headers=headers).status_code == 200


@pytest.mark.parametrize("content_type", [None, "", "application/x-www-form-urlencoded"])
def test_a_client_that_only_posts_means_json(api: Api, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = api.request("POST", "/v1/completions", content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 200
    response = api.request("POST", "/v1/completions", content=b"prompt=x", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded"])
def test_what_any_web_page_could_send_unasked_is_refused(api: Api, content_type: str | None) -> None:
    headers = {"origin": "https://evil.example"} | ({} if content_type is None else {"content-type": content_type})
    response = api.request("POST", "/v1/completions", content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 415


def test_an_encoded_body_is_a_415_that_names_the_coding(api: Api) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = api.request("POST", "/v1/completions", content=gzip.compress(b'{"prompt":"x"}'), headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["message"] == "the body must not be encoded, got content-encoding 'gzip'"


def test_a_byte_order_mark_is_ignored(api: Api) -> None:
    assert api.post_raw(b'\xef\xbb\xbf{"prompt":"x"}').status_code == 200


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
def test_the_limit_is_exact(make_api: Callable[..., Api], size: int, status: int) -> None:
    api = make_api(FakeEngineClient(), max_body_bytes=LIMIT)
    assert api.post_raw(fits(size)).status_code == status


def test_a_body_of_20_megabytes_is_a_413(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), max_body_bytes=4 * 2**20)
    body = fits(20 * 10**6)
    response = httpx.post(
        server.url + "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=20
    )
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert response.json() == {
        "error": {
            "message": "the body may have at most 4194304 bytes, got 20000000 bytes",
            "type": "invalid_request_error",
            "param": None,
            "code": "body_too_large",
        }
    }


def test_a_body_of_unknown_length_is_refused_before_it_ends(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), max_body_bytes=LIMIT)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        client.sendall(b"%x\r\n%s\r\n" % (LIMIT + 1, fits(LIMIT + 1)))  # the last chunk never comes
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body may have at most 2000 bytes, got more" in answer


def test_a_body_that_was_refused_leaves_its_room_to_the_next(
    make_api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptserve.server.http.body.MAX_INCOMING_BYTES", LIMIT)
    api = make_api(FakeEngineClient(), max_body_bytes=LIMIT)
    assert api.post_raw(b"x" * LIMIT).status_code == 400
    assert api.post_raw(fits(LIMIT)).status_code == 200


def test_a_client_that_leaves_amid_its_body_leaves_nothing(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient())
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(HEAD + b'content-length: 100\r\n\r\n{"prompt"')
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=20).status_code == 200
    assert len(server.engine.submitted) == 1


def test_a_body_that_does_not_arrive_in_time_is_a_408(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), body_limit_s=0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(HEAD + b'content-length: 100\r\n\r\n{"prompt"')
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body must arrive within 0.05 s" in answer


def list_of(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    ("body", "mark", "most"),
    [
        (b'{"prompt":"x","a":' + b"[" * 100 + list_of(b"[]", 2**16) + b"]" * 100 + b"}", "[", 2**16),
        (b'{"prompt":"' + b"[" * (2**16 + 1) + b'"}', "[", 2**16),
        (b'{"prompt":"x","a":' + list_of(b"{}", 2**14) + b"}", "{", 2**14),
        (b'{"messages":' + list_of(b'{"role":"user","content":""}', 2**14) + b"}", "{", 2**14),
        (b'{"prompt":"x",' + b",".join(b'"%x":0' % i for i in range(2**16)) + b"}", ":", 2**16),
        (b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":0' % i for i in range(2**16)) + b"}}", ":", 2**16),
        (b'{"prompt":' + list_of(b"1", 2**18 + 2) + b"}", ",", 2**18),
        (b'{"prompt":"x","stop_token_ids":' + list_of(b"1", 2**18 + 1) + b"}", ",", 2**18),
    ],
    ids=["lists", "a string", "objects", "messages", "unknown fields", "logit_bias", "ids", "stop ids"],
)
def test_a_body_that_would_take_long_to_parse_is_refused_before(api: Api, body: bytes, mark: str, most: int) -> None:
    error = api.post_raw(body).json()["error"]
    got = body.count(mark.encode())
    message = f"the body may have {mark!r} at most {most} times, in strings or not, got {got}"
    assert (error["code"], error["message"]) == ("body_too_complex", message)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":' + list_of(b"50000", 131_072) + b"}",
        b'{"prompt":' + list_of(list_of(b"50000", 1024), 128) + b"}",
        b'{"prompt":' + list_of(b'"x, y"', 128) + b"}",
        b'{"prompt":"' + b'{\\"id\\": 1, \\"name\\": [\\"x\\"]}, ' * 16_000 + b'"}',
        b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":0' % i for i in range(1024)) + b"}}",
    ],
    ids=["128k ids", "128 lists of ids", "128 texts", "500 KB of JSON", "logit_bias"],
)
def test_what_a_model_can_be_asked_is_not_too_complex(body: bytes) -> None:
    assert parse_json_object(body).keys() >= {"prompt"}


def test_large_and_small_numbers_are_finite() -> None:
    body = b'{"prompt":"1e999","x":[1.7e308,1e-999,0e999,%s]}' % (b"9" * 400)
    assert parse_json_object(body) == {"prompt": "1e999", "x": [1.7e308, 0, 0, int("9" * 400)]}


def test_bodies_that_arrive_at_once_are_bounded_and_the_slowest_gives_way(
    serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptserve.server.http.body.MAX_INCOMING_BYTES", 30 * LIMIT)
    server = serve(FakeEngineClient(), max_body_bytes=10 * LIMIT)
    head = HEAD + b"content-length: %d\r\n\r\n" % (10 * LIMIT)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(5)]
        for client in clients:
            client.sendall(head + b" " * (9 * LIMIT))
        answers = [received_until(client, b"}}") for client in clients[:2]]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        assert all(b'"code":"too_many_bodies"' in answer for answer in answers)
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=20).status_code == 200
        clients[-1].sendall(fits(LIMIT))
        assert clients[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
