"""Which hosts the server answers to: by default, by --allowed-hosts, and for probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import FakeEngineClient
from tests.server.http.test_protocol import exchange

REFUSED = {
    "message": "the host 'evil.example' is not one that --allowed-hosts lets this server answer to",
    "type": "invalid_request_error",
    "param": None,
    "code": "host_not_allowed",
}


def status(api: Api, host: str, path: str = "/v1/models") -> int:
    return api.get(path, headers={"host": host, "authorization": "Bearer secret"}).status_code


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        (
            {},
            ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000"],
            [
                "evil.example",
                "evil.example:8000",
                "",
                "127.0.0.1.evil.example",
                "localhost.evil.example",
                "[::2]",
                "::1",
            ],
        ),
        ({"host": "127.0.0.2"}, ["127.0.0.2:8000", "localhost"], ["127.0.0.3", "evil.example"]),
        ({"host": "::1"}, ["[::1]:8000", "localhost"], ["evil.example"]),
        ({"host": "localhost"}, ["localhost", "127.0.0.1:1"], ["evil.example"]),
        ({"host": "0.0.0.0"}, ["evil.example", "localhost", ""], []),
        ({"host": "llm.example.com"}, ["evil.example"], []),
        ({"api_keys": ("secret",)}, ["evil.example", "localhost"], []),
        ({"allowed_hosts": "*"}, ["evil.example"], []),
        ({"allowed_hosts": "a.example, *"}, ["evil.example"], []),
        (
            {"allowed_hosts": "LLM.example.com, *.example.org,[fd00::1]"},
            ["llm.example.com:443", "a.example.org", "b.a.example.org:1", "A.Example.Org.", "[FD00::1]:80"],
            ["localhost", "example.org", "example.com", "a.example.org.evil.example", "aexample.org", "[fd00::2]"],
        ),
        (
            {"allowed_hosts": "a.example", "api_keys": ("secret",), "host": "0.0.0.0"},
            ["a.example"],
            ["localhost", "evil.example"],
        ),
    ],
)
def test_the_hosts_that_are_answered_to(
    make_api: Callable[..., Api], options: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    api = make_api(FakeEngineClient(), **{"allowed_hosts": None, **options})
    assert {host: status(api, host) for host in allowed} == dict.fromkeys(allowed, 200)
    assert {host: status(api, host) for host in refused} == dict.fromkeys(refused, 403)


def test_a_refusal_names_the_option(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), allowed_hosts=None)
    for path in ("/", "/v1/models", "/version", "/nowhere"):
        response = api.get(path, headers={"host": "evil.example"})
        assert (response.status_code, response.json()["error"]) == (403, REFUSED)
        assert response.headers["x-request-id"]
    response = api.request("POST", "/v1/completions", json={"prompt": "a"}, headers={"host": "evil.example"})
    assert response.json()["error"] == REFUSED
    assert api.engine.submitted == []


def test_a_request_over_http_1_0_needs_no_host(serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngineClient(), allowed_hosts=None)

    assert exchange(server, [b"GET /v1/models HTTP/1.0\r\n\r\n"]).startswith(b"HTTP/1.1 200 ")
    assert exchange(server, [b"GET /v1/models HTTP/1.0\r\nhost: evil.example\r\n\r\n"]).startswith(b"HTTP/1.1 403 ")
    assert exchange(server, [b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n"]).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_may_use_any_host(make_api: Callable[..., Api], path: str) -> None:
    assert status(make_api(FakeEngineClient(), allowed_hosts=None), "10.0.0.7:8000", path) == 200
    behind = make_api(FakeEngineClient(), allowed_hosts=None, root_path="/llm")
    assert status(behind, "10.0.0.7:8000", f"/llm{path}") == 200
    assert status(behind, "evil.example", "/llm/v1/models") == 403
    assert status(behind, "localhost:8000", "/llm/v1/models") == 200
