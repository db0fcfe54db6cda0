from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture
def guarded(make_api: Callable[..., Api]) -> Api:
    return make_api(FakeEngineClient(), api_keys=KEYS)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded: Api, key: str) -> None:
    assert guarded.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.get("/v1/models", headers=[(b"Authorization", b"bearer  " + key.encode())]).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/version", "/openapi.json", "/nowhere"])
def test_every_route_but_the_probes_needs_a_key(guarded: Api, path: str) -> None:
    response = guarded.get(path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert response.json() == {
        "error": {
            "message": "this server needs an API key: send the header 'Authorization: Bearer KEY'",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(guarded: Api, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("header", [b"Bearer first-ke", b"Bearer first-keyy", b"Bearer ", b"Bearer", b"Bearer \xff"])
def test_a_wrong_key_opens_nothing(guarded: Api, header: bytes) -> None:
    response = guarded.get("/v1/models", headers=[(b"authorization", header)])
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", [b"Basic first-key", b"first-key"])
def test_another_scheme_opens_nothing(guarded: Api, header: bytes) -> None:
    assert guarded.get("/v1/models", headers=[(b"authorization", header)]).status_code == 401


def test_without_keys_everything_is_open(api: Api) -> None:
    assert api.get("/v1/models").status_code == 200


def test_a_key_is_checked_before_the_body_is_read(guarded: Api) -> None:
    assert guarded.post_raw(b"{").status_code == 401
    assert guarded.engine.submitted == []
