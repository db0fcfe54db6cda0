from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from gptserve.server.schemas.base import _Model
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest
from gptserve.server.schemas.messages import MessagesRequest
from gptserve.server.schemas.openapi import _field_docstrings
from tests.server.conftest import MODEL, Api, LiveServer
from tests.server.fake_engine import FakeEngineClient


@pytest.fixture(scope="module")
def answer() -> Iterator[httpx.Response]:
    with closing(Api(FakeEngineClient())) as api:
        yield api.get("/openapi.json")


@pytest.fixture
def document(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()
    return found


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert {"CompletionRequest", "StreamOptions", "Completion", "ErrorBody"} <= names
    assert names <= set(document["components"]["schemas"])
    assert text.count('"$ref"') == text.count('"$ref": "#/components/schemas/')


class Extended(_Model):
    kept: int
    """is kept, and
    has two lines"""
    changed: int
    """is changed"""
    plain: int


class Extending(Extended):
    changed: str  # type: ignore[assignment]
    added: int
    """is added"""


def test_fields_are_described_by_the_strings_below_them(document: dict[str, Any]) -> None:
    assert _field_docstrings(Extending) == {"kept": "is kept, and\nhas two lines", "added": "is added"}
    for model in ("CompletionRequest", "ChatRequest"):
        properties = document["components"]["schemas"][model]["properties"]
        assert properties["n"]["description"] == "completions per prompt; default 1"
        assert properties["seed"]["description"] == "drawn and reported back when left out or -1"
        assert "description" not in properties["model"]
    assert "description" in document["components"]["schemas"]["Completion"]["properties"]["system_fingerprint"]


def test_a_completions_body_and_answers_are_described(document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/completions"]["post"]
    assert operation["requestBody"]["required"] is True
    errors = {"400", "401", "404", "408", "409", "413", "415", "429", "500", "503"}
    assert set(operation["responses"]) == {"200", "202", "204"} | errors
    names = [parameter["name"] for parameter in operation["parameters"]]
    assert names == ["Idempotency-Key", "starting_after", "Last-Event-ID"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    event = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    [chunk, end] = event["properties"]["data"]["anyOf"]
    names = [option["$ref"].rpartition("/")[2] for option in chunk["contentSchema"]["anyOf"]]
    assert (names, end) == (["Completion", "ErrorBody"], {"const": "[DONE]"})
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert set(schema["properties"]) == set(CompletionRequest.model_fields)
    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is True, "unknown fields are let through"


def test_a_chats_body_and_answers_are_described(document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert set(operation["responses"]) == set(document["paths"]["/v1/completions"]["post"]["responses"])
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert {"ChatCompletion", "ChatCompletionChunk", "Message", "TextPart"} <= set(schemas)


def test_messages_are_described_with_their_own_errors(document: dict[str, Any]) -> None:
    create, count = (document["paths"][f"/v1/messages{end}"]["post"] for end in ("", "/count_tokens"))
    assert set(create["responses"]) == set(count["responses"])
    for operation in (create, count):
        for status in set(operation["responses"]) - {"200"}:
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith("/MessagesErrorBody")
    event = create["responses"]["200"]["content"]["text/event-stream"]["schema"]
    [data] = event["properties"]["data"]["anyOf"]
    names = [option["$ref"].rpartition("/")[2] for option in data["contentSchema"]["anyOf"]]
    assert names == ["MessageEvent", "MessagesErrorBody"]
    schemas = document["components"]["schemas"]
    assert set(schemas["MessagesRequest"]["properties"]) == set(MessagesRequest.model_fields)
    assert set(schemas["MessagesRequest"]["required"]) == {"messages", "max_tokens"}
    assert schemas["TokenCountRequest"]["required"] == ["messages"]
    assert schemas["MessagesRequest"]["additionalProperties"] is True


def test_background_completions_are_described(document: dict[str, Any]) -> None:
    paths = document["paths"]
    retrieve, cancel = paths["/v1/completions/{id}"]["get"], paths["/v1/completions/{id}/cancel"]["post"]
    events = paths["/v1/completions/{id}/events"]["get"]
    assert set(retrieve["responses"]) == set(cancel["responses"]) == {"200", "401", "404", "500"}
    assert set(events["responses"]) == {"200", "204", "400", "401", "404", "500"}
    assert set(events["responses"]["200"]["content"]) == {"text/event-stream"}
    assert [parameter["name"] for parameter in events["parameters"]] == ["id", "starting_after", "Last-Event-ID"]
    of_chats = paths["/v1/chat/completions/{id}/events"]["get"]
    assert of_chats["parameters"] == events["parameters"]
    assert set(paths["/v1/completions"]["get"]["responses"]) == {"200", "400", "401"}
    schemas = document["components"]["schemas"]
    assert {"BackgroundCompletion", "KeptCompletion", "KeptChatCompletion"} <= set(schemas)
    assert schemas["KeptCompletion"]["properties"]["status"]["enum"] == [
        "queued",
        "in_progress",
        "completed",
        "failed",
        "cancelled",
    ]


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and description of every operation."""
    return [(method, path, of) for path, by_method in document["paths"].items() for method, of in by_method.items()]


def test_every_operation_has_a_short_name_of_its_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert {"create_completion", "create_chat_completion", "retrieve_completion", "tokenize", "health"} <= set(names)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_links_lead_from_a_background_completion_to_all_that_can_follow(
    document: dict[str, Any], serve: Callable[..., LiveServer], path: str
) -> None:
    server = serve(FakeEngineClient())
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    named = {operation["operationId"]: (method, way) for method, way, operation in operations(document)}
    begun = httpx.post(server.url + path, json={**body, "background": True}, timeout=20)
    links = document["paths"][path]["post"]["responses"][str(begun.status_code)]["links"]
    assert set(links) == {"retrieve_completion", "stream_completion", "cancel_completion"}
    for link in links.values():
        assert link["parameters"] == {"id": "$response.body#/id"}
        method, way = named[link["operationId"]]
        assert httpx.request(method, server.url + way.format(id=begun.json()["id"]), timeout=20).status_code == 200
    for of in ("retrieve_completion", "cancel_completion"):
        method, way = named[of]
        further = document["paths"][way][method]["responses"]["200"]["links"]
        assert {link["operationId"] for link in further.values()} == set(links)
        assert all(link["parameters"] == {"id": "$request.path.id"} for link in further.values())


def test_a_link_leads_to_the_model(api: Api, document: dict[str, Any]) -> None:
    [link] = document["paths"]["/v1/models"]["get"]["responses"]["200"]["links"].values()
    assert link == {"operationId": "retrieve_model", "parameters": {"model": "$response.body#/data/0/id"}}
    assert api.get("/v1/models").json()["data"][0]["id"] == MODEL


def out_of_bounds(schema: dict[str, Any]) -> Iterator[object]:
    """Yield values that break one limit of a JSON schema each."""
    for option in schema.get("anyOf", schema.get("oneOf", ())):
        yield from out_of_bounds(option)
    for limit, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
        if limit in schema:
            yield schema[limit] + step
    if schema.get("minLength"):
        yield ""
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if schema.get("minItems"):
        yield []
    if "maxItems" in schema:
        entry = {"string": "x", "integer": 1, "array": [1]}[schema["items"]["type"]]
        yield [entry] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        yield {str(token_id): 1 for token_id in range(schema["maxProperties"] + 1)}


@pytest.mark.parametrize(("route", "model"), [("complete", CompletionRequest), ("chat", ChatRequest)])
def test_a_value_that_the_document_rules_out_is_refused(api: Api, route: str, model: type[CompletionRequest]) -> None:
    properties = model.model_json_schema()["properties"]
    cases = [(name, value) for name, schema in properties.items() for value in out_of_bounds(schema)]
    limited = {name for name, _ in cases}
    assert {"temperature", "top_k", "seed", "stop", "stop_token_ids", "logit_bias", "n", "cache_salt"} <= limited
    for name, value in cases:
        response = getattr(api, route)(**{**({"prompt": "x"} if route == "complete" else {}), name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), (name, value)


def test_prompt_logprobs_are_described_where_they_come(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "Choice", "ChatCompletion", "ChatCompletionChunk"):
        assert "prompt" in schemas[name]["properties"]["prompt_logprobs"]["description"]
    assert set(schemas["PromptLogprob"]["required"]) == {"logprob", "rank", "decoded_token"}
    for name in ("ChatChoice", "ChunkChoice"):
        assert "prompt_logprobs" not in schemas[name]["properties"]


def test_no_status_is_declared_that_never_comes(document: dict[str, Any]) -> None:
    assert '"422"' not in json.dumps(document)


def test_every_route_is_described(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/completions/{id}",
        "/v1/completions/{id}/events",
        "/v1/completions/{id}/cancel",
        "/v1/chat/completions",
        "/v1/chat/completions/{id}",
        "/v1/chat/completions/{id}/events",
        "/v1/chat/completions/{id}/cancel",
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/responses/{id}/cancel",
        "/v1/responses/{id}/input_items",
        "/v1/responses/input_tokens",
        "/v1/batches",
        "/v1/batches/{id}",
        "/v1/batches/{id}/cancel",
        "/v1/files",
        "/v1/files/{id}",
        "/v1/files/{id}/content",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/playground/engine",
    }


def test_a_needed_key_is_described(make_api: Callable[..., Api], document: dict[str, Any]) -> None:
    assert "security" not in document
    api = make_api(FakeEngineClient(), api_keys=("k",))
    guarded = api.get("/openapi.json").json()
    assert guarded["security"] == [{"key": []}, {"x_api_key": []}]
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    assert guarded["components"]["securitySchemes"]["x_api_key"] == header
    assert guarded["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}


@pytest.mark.some(1)
@pytest.mark.parametrize("protected", [False, True])
def test_the_document_says_which_routes_are_open(make_api: Callable[..., Api], protected: bool) -> None:
    api = make_api(FakeEngineClient(), api_keys=("k",), protect_operations=protected)
    paths = api.get("/openapi.json", headers={"authorization": "Bearer k"}).json()["paths"]
    said_open = {path for path in paths if all(operation.get("security") == [] for operation in paths[path].values())}
    may_refuse = {path for path in paths if any("401" in operation["responses"] for operation in paths[path].values())}
    assert said_open == {"/health", "/ready"} | (set() if protected else {"/metrics", "/version"})
    assert may_refuse == set(paths) - said_open
    for path in (path for path in paths if "get" in paths[path]):
        assert (api.get(path).status_code == 401) == (path not in said_open)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_there_are_no_pages_that_load_scripts_from_elsewhere(api: Api, path: str) -> None:
    assert api.get(path).status_code == 404
