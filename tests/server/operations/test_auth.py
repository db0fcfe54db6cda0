from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from gptserve.server.core.keys import option_name
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

KEYS = ("first-key", "second,key")


@pytest.fixture
def guarded(make_api: Callable[..., Api]) -> Api:
    return make_api(FakeEngineClient(), api_keys=KEYS)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded: Api, key: str) -> None:
    assert guarded.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.get("/v1/models", headers=[(b"Authorization", b"bearer  " + key.encode())]).status_code == 200


def test_a_part_of_a_key_with_a_comma_opens_nothing(guarded: Api) -> None:
    for part in ("second", "key"):
        assert guarded.get("/v1/models", headers=bearer(part)).status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/completions/x", "/nowhere", "/metrics/"])
def test_every_route_but_the_operators_needs_a_key(guarded: Api, path: str) -> None:
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
@pytest.mark.parametrize("protected", [False, True])
def test_probes_need_no_key(make_api: Callable[..., Api], path: str, protected: bool) -> None:
    api = make_api(FakeEngineClient(), api_keys=KEYS, protect_operations=protected)
    assert api.get(path).status_code == 200


@pytest.mark.some(1)
@pytest.mark.parametrize("path", ["/metrics", "/version", "/openapi.json"])
def test_operations_need_a_key_when_they_are_protected(make_api: Callable[..., Api], path: str) -> None:
    api = make_api(FakeEngineClient(), api_keys=KEYS)
    assert api.get(path).status_code == 200
    api = make_api(FakeEngineClient(), api_keys=KEYS, protect_operations=True)
    assert api.get(path).status_code == 401
    assert api.get(path, headers=bearer(KEYS[0])).status_code == 200


def test_the_name_of_a_key_is_in_the_log_line(guarded: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gptserve")
    guarded.get("/v1/models", headers=bearer(KEYS[1]))
    guarded.get("/version")
    guarded.get("/v1/models", headers=bearer("wr0ng"))

    lines = [record for record in caplog.records if record.name == "gptserve.server.http.envelope"]
    assert [vars(line).get("key") for line in lines] == [option_name(KEYS[1]), None, None]
    assert f" key={option_name(KEYS[1])} " in lines[0].getMessage()
    assert not any(key in str(vars(record)) for record in caplog.records for key in (*KEYS, "wr0ng"))


def test_an_error_is_logged_with_the_name_of_the_key(guarded: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gptserve")
    assert guarded.get("/nowhere", headers=bearer(KEYS[0])).status_code == 404
    [line] = [record for record in caplog.records if record.name == "gptserve.server.http.envelope"]
    assert (vars(line)["key"], vars(line)["error"]) == (option_name(KEYS[0]), "not_found")


def test_keys_of_a_file_open_under_the_names_it_gives(
    make_api: Callable[..., Api], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gptserve")
    (tmp_path / "keys").write_text("alice: s3cret")
    api = make_api(FakeEngineClient(), api_key_file=tmp_path / "keys")
    assert api.get("/v1/models").status_code == 401
    assert api.get("/v1/models", headers=bearer("s3cret")).status_code == 200
    assert vars(caplog.records[-1])["key"] == "alice"


@pytest.mark.parametrize("header", [b"Bearer first-ke", b"Bearer first-keyy", b"Bearer ", b"Bearer", b"Bearer \xff"])
def test_a_wrong_key_opens_nothing(guarded: Api, header: bytes) -> None:
    response = guarded.get("/v1/models", headers=[(b"authorization", header)])
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", [b"Basic first-key", b"first-key"])
def test_another_scheme_opens_nothing(guarded: Api, header: bytes) -> None:
    assert guarded.get("/v1/models", headers=[(b"authorization", header)]).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_a_key_may_come_as_anthropics_clients_send_it(guarded: Api, key: str) -> None:
    assert guarded.get("/v1/models", headers=[(b"x-api-key", key.encode())]).status_code == 200
    for other in (b"Bearer wrong", b"Basic wrong"):  # of two keys one has to be valid
        both = [(b"authorization", other), (b"x-api-key", b" " + key.encode() + b" ")]
        assert guarded.get("/v1/models", headers=both).status_code == 200
    assert guarded.get("/v1/models", headers=[*bearer(key), (b"x-api-key", b"wrong")]).status_code == 200


@pytest.mark.parametrize("header", [b"", b"first-ke", b"Bearer first-key", b"\xff"])
def test_a_wrong_key_of_that_header_opens_nothing(guarded: Api, header: bytes) -> None:
    response = guarded.get("/v1/models", headers=[(b"x-api-key", header)])
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_whoever_asks_whether_there_is_a_server_needs_no_key(guarded: Api) -> None:
    response = guarded.request("HEAD", "/")
    assert (response.status_code, response.content) == (200, b"")
    assert guarded.request("HEAD", "/v1/models").status_code == 401
    assert guarded.request("POST", "/").status_code == 405


def test_without_keys_everything_is_open(api: Api) -> None:
    assert api.get("/v1/models").status_code == 200


def test_a_key_is_checked_before_the_body_is_read(guarded: Api) -> None:
    assert guarded.post_raw(b"{").status_code == 401
    assert guarded.engine.submitted == []
