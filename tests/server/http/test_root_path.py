from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient


@pytest.mark.parametrize("path", ["/health", "/llm/health"])
def test_requests_may_have_the_root_path_or_not(make_api: Callable[..., Api], path: str) -> None:
    assert make_api(FakeEngineClient(), root_path="/llm").get(path).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/llm", "/llmhealth", "/llm/llm/health", "/other/health"])
def test_other_paths_stay_as_they_are(make_api: Callable[..., Api], path: str) -> None:
    assert make_api(FakeEngineClient(), root_path="/llm").get(path).status_code == 404


def test_a_key_is_needed_under_the_root_path_too(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), root_path="/llm", api_keys=("k",))
    assert api.get("/llm/health").status_code == 200
    for path in ("/llm/v1/models", "/v1/models", "/health/llm/v1/models"):
        assert api.get(path).status_code == 401
    assert api.get("/llm/v1/models", headers={"authorization": "Bearer k"}).status_code == 200


@pytest.mark.slow
def test_the_document_names_the_root_path(make_api: Callable[..., Api], api: Api) -> None:
    under = make_api(FakeEngineClient(), root_path="/llm").get("/llm/openapi.json").json()
    assert under["servers"] == [{"url": "/llm"}]
    assert "servers" not in api.get("/openapi.json").json()
