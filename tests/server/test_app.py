from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

IMPORTS = """
import sys
import gptserve.server.app, gptserve.server.api.completions
heavy = {"torch", "numpy", "transformers", "tiktoken"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_application_imports_no_torch() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_an_unknown_route_is_a_404(api: Api) -> None:
    response = api.get("/v1/chat")
    assert response.status_code == 404
    assert response.json() == {
        "error": {
            "message": "there is no route GET /v1/chat; /openapi.json lists the routes",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found",
        }
    }


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("GET", "/health/", "/health"),
        ("POST", "/completions", "/v1/completions"),
        ("POST", "/chat/completions/", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/openai/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/completion", "/v1/completions"),
    ],
)
def test_a_404_says_what_to_call(api: Api, method: str, path: str, meant: str) -> None:
    response = api.request(method, path)
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"there is no route {method} {path}; call {method} {meant}"


def test_a_client_of_ollama_is_told_in_its_envelope_what_to_call(api: Api) -> None:
    for method, path, meant in (("POST", "/api/chat", "/v1/chat/completions"), ("GET", "/api/tags", "/v1/models")):
        response = api.request(method, path)
        assert (response.status_code, response.headers["x-request-id"] != "") == (404, True)
        assert response.json() == {"error": f"there is no route {method} {path}; call {method} {meant}"}


def test_a_404_says_no_more_of_a_path_than_200_characters(api: Api) -> None:
    message = api.get("/" + "x" * 5000).json()["error"]["message"]
    assert message == f"there is no route GET /{'x' * 199}; /openapi.json lists the routes"


ORIGIN = "https://chat.example"


@pytest.fixture
def cross_origin(make_api: Callable[..., Api]) -> Api:
    return make_api(FakeEngineClient(), allowed_origins=ORIGIN, api_keys=("secret",))


def test_a_preflight_needs_no_key(cross_origin: Api) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    response = cross_origin.request("OPTIONS", "/v1/completions", headers={"origin": ORIGIN, **asked})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"


def test_a_preflight_of_another_origin_is_refused(cross_origin: Api) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    response = cross_origin.request("OPTIONS", "/v1/completions", headers=asked)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("secret", {"prompt": "x"}, 200),
        ("secret", {"prompt": "x", "stream": True}, 200),
        ("secret", {"prompt": 1.5}, 400),
        ("wrong", {"prompt": "x"}, 401),
    ],
)
def test_every_answer_lets_the_page_read_it(cross_origin: Api, key: str, body: dict[str, Any], status: int) -> None:
    headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
    response = cross_origin.request("POST", "/v1/completions", json=body, headers=headers)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
    assert response.headers["x-request-id"]


def test_without_allowed_origins_no_page_of_another_origin_reads_anything(api: Api) -> None:
    response = api.request("POST", "/v1/completions", json={"prompt": "x"}, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers


def test_another_method_is_a_405(api: Api) -> None:
    for method, path, takes in (
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "GET, POST"),
        ("PUT", "/v1/responses/input_tokens", "POST"),
        ("PUT", "/v1/responses/resp_1", "GET, DELETE"),
    ):
        response = api.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == takes
        assert response.json()["error"]["message"] == f"this route does not take {method} {path}; it takes {takes}"
        assert response.json()["error"]["code"] == "method_not_allowed"
