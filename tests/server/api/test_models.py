from __future__ import annotations

from collections.abc import Callable

from gptserve.server.api.schemas import Model, ModelList
from gptserve.server.app import create_app
from tests.server.app_options import app_options
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient


def test_the_one_model_is_listed(api: Api) -> None:
    body = api.get("/v1/models").json()
    ModelList.model_validate(body, strict=True, extra="forbid")
    assert [model["id"] for model in body["data"]] == [MODEL]
    assert body["data"][0]["max_model_len"] == 256


def test_a_model_is_found_by_its_id(api: Api) -> None:
    body = api.get(f"/v1/models/{MODEL}").json()
    Model.model_validate(body, strict=True, extra="forbid")
    assert body == api.get("/v1/models").json()["data"][0]


def test_an_id_may_hold_a_slash(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient())
    api.app = create_app(api.engine, ByteTokenizer(), app_options("openai-community/gpt2"))
    assert api.get("/v1/models/openai-community/gpt2").json()["id"] == "openai-community/gpt2"
    assert api.get("/v1/models/openai-community%2Fgpt2").json()["id"] == "openai-community/gpt2"


def test_an_unknown_model_is_a_404(api: Api) -> None:
    response = api.get("/v1/models/gpt-9")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "model 'gpt-9' does not exist; this server has 'test-model'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
