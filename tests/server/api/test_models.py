from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from gptserve.server.schemas.completions import Model, ModelList
from tests.server.app_options import make_app
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import ByteTokenizer, FakeEngineClient


def test_the_one_model_is_listed(api: Api) -> None:
    body = api.get("/v1/models").json()
    ModelList.model_validate(body, strict=True, extra="forbid")
    assert [model["id"] for model in body["data"]] == [MODEL]
    assert body["data"][0]["max_model_len"] == 256


def test_models_have_what_anthropics_clients_read(make_api: Callable[..., Api]) -> None:
    body = make_api(FakeEngineClient(), aliases=("other",)).get("/v1/models").json()
    assert body["has_more"] is False
    for model in body["data"]:
        assert (model["type"], model["display_name"]) == ("model", model["id"])
        assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


def test_a_model_is_found_by_its_id(api: Api) -> None:
    body = api.get(f"/v1/models/{MODEL}").json()
    Model.model_validate(body, strict=True, extra="forbid")
    assert body == api.get("/v1/models").json()["data"][0]


def test_an_id_may_hold_a_slash(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient())
    api.app = make_app(api.engine, ByteTokenizer(), "openai-community/gpt2")
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


def test_a_model_has_all_its_names(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), aliases=("gpt-4o", "org/other"))
    models = api.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [MODEL, "gpt-4o", "org/other"]
    assert [api.get(f"/v1/models/{model['id']}").json() for model in models] == models
    for name in (MODEL, "gpt-4o", "org/other", None):
        assert api.complete(prompt="x", model=name).json()["model"] == MODEL
    message = "model 'gpt-9' does not exist; this server has 'test-model', 'gpt-4o', 'org/other'"
    assert api.complete(prompt="x", model="gpt-9").json()["error"]["message"] == message


def test_a_models_own_sampling_defaults_are_shown_and_taken(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), sampling_defaults={"temperature": 0.5, "top_k": 3}, max_new_tokens=5)
    body = api.get("/v1/models").json()
    ModelList.model_validate(body, strict=True, extra="forbid")
    assert body["data"][0]["sampling_defaults"] == {"temperature": 0.5, "top_k": 3}
    api.complete(prompt="x")
    api.complete(prompt="x", temperature=1, top_k=0)
    api.chat()
    api.chat(max_tokens=9)
    params = [request.params for request in api.engine.submitted]
    assert [(p.temperature, p.top_k) for p in params] == [(0.5, 3), (1.0, 0), (0.5, 3), (0.5, 3)]
    assert [p.max_tokens for p in params] == [16, 16, 5, 9], "a completion has OpenAI's limit, a chat the model's"
