from __future__ import annotations

import subprocess
import sys

from tests.server.conftest import Api

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
            "message": "there is no route GET /v1/chat",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found",
        }
    }


def test_a_route_is_not_found_with_a_slash_behind_it(api: Api) -> None:
    assert api.get("/health/").status_code == 404


def test_another_method_is_a_405(api: Api) -> None:
    response = api.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "this route does not take GET /v1/completions"
    assert response.json()["error"]["code"] == "method_not_allowed"
