"""Every field of OpenAI's client for responses is known, and the routes beside POST /v1/responses."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import pytest
from openai.types.responses import (
    CustomToolParam,
    FunctionToolParam,
    NamespaceToolParam,
    ResponseCustomToolCallOutputParam,
    ResponseCustomToolCallParam,
    ResponseFunctionToolCallParam,
    ResponseIncludable,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import PromptCacheOptions, ResponseCreateParamsNonStreaming
from openai.types.responses.response_input_item_param import FunctionCallOutput, ItemReference, Message
from openai.types.shared_params import Reasoning

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.schemas.response_fields import UNREAD, take_response_fields
from gptserve.server.schemas.responses import Includable, ResponsesRequest
from tests.server.api.test_response_tool_kinds import AGENTS, ITEMS, PATCH, TOOLS
from tests.server.api.test_responses import PATH, Serve, post, prompt_of, respond
from tests.server.api.test_tools import api_of
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient, say

SOMETHING = {"x": ["y"]}
NEWER = {"background_options"}
"""Fields that a newer client has than the one that is installed here."""
MESSAGE = {"role": "user", "content": "hi"}


def fields_of(params: Any) -> list[str]:
    return sorted(typing.get_type_hints(params))


def is_known(given: Mapping[str, Any]) -> bool:
    """Return whether all fields of a body are read, taken for nothing or refused in words."""
    try:
        return take_response_fields(given, ResponsesRequest)[1] == []
    except InvalidRequestError as error:
        return error.code in ("unsupported_parameter", "missing_required_parameter")


OF_REQUESTS = {*fields_of(ResponseCreateParamsNonStreaming), *fields_of(InputTokenCountParams)}


@pytest.mark.parametrize("name", sorted(OF_REQUESTS))
def test_every_field_of_a_request_is_known(name: str) -> None:
    assert is_known({name: "x"})


def test_no_field_that_is_read_stands_in_the_table() -> None:
    assert not UNREAD.keys() & ResponsesRequest.model_fields.keys()
    assert set(UNREAD) >= NEWER


def test_everything_that_may_be_included_is_known() -> None:
    assert set(typing.get_args(Includable)) == set(typing.get_args(ResponseIncludable))


@pytest.mark.parametrize(
    ("where", "params"),
    [("reasoning", Reasoning), ("text", ResponseTextConfigParam), ("prompt_cache_options", PromptCacheOptions)],
)
def test_every_field_of_an_option_is_known(where: str, params: Any) -> None:
    for name in fields_of(params):
        assert is_known({where: {name: "x"}}), name


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("message", Message),
        ("message", ResponseOutputMessageParam),
        ("reasoning", ResponseReasoningItemParam),
        ("function_call", ResponseFunctionToolCallParam),
        ("function_call_output", FunctionCallOutput),
        ("custom_tool_call", ResponseCustomToolCallParam),
        ("custom_tool_call_output", ResponseCustomToolCallOutputParam),
        ("item_reference", ItemReference),
    ],
)
def test_every_field_of_an_item_is_known(kind: str, params: Any) -> None:
    for name in set(fields_of(params)) - {"type"}:
        assert is_known({"input": [{"type": kind, name: SOMETHING}]}), name
    for name in fields_of(ResponseOutputTextParam):
        assert is_known({"input": [{**MESSAGE, "content": [{"type": "output_text", name: SOMETHING}]}]}), name


@pytest.mark.parametrize(
    ("kind", "params"),
    [("function", FunctionToolParam), ("custom", CustomToolParam), ("namespace", NamespaceToolParam)],
)
def test_every_field_of_a_tool_is_known(kind: str, params: Any) -> None:
    for name in set(fields_of(params)) - {"type"}:
        value = {"type": "grammar"} if name == "format" else SOMETHING
        assert is_known({"tools": [{"type": kind, name: value}]}), name


def test_parts_of_every_kind_are_texts_of_any_message(api: Api) -> None:
    parts = [
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "b"},
        {"type": "input_text", "text": "c"},
    ]
    for role in ("user", "assistant"):
        assert respond(api, input=[{"role": role, "content": parts}], max_output_tokens=2).status_code == 200
        assert prompt_of(api) == f"[{role}]a\nb\nc<|endoftext|>>"


def count(api: Api, **body: Any) -> Any:
    return api.request("POST", f"{PATH}/input_tokens", json={"input": "hi", **body})


def test_the_tokens_of_an_input_are_counted(api: Api, make_api: Any) -> None:
    for asked in ({}, {"instructions": "Be brief"}, {"input": [MESSAGE, MESSAGE]}):
        counted = count(api, **asked).json()
        usage = respond(api, **asked, max_output_tokens=2).json()["usage"]
        assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert count(api, input="x" * 300).json()["input_tokens"] == 308, "more than the context holds"

    with_tools = api_of(make_api, "hermes")
    asked = {"tools": TOOLS, "input": [MESSAGE, {**ITEMS[2], "call_id": "c"}]}
    counted = count(with_tools, **asked)
    assert counted.headers["x-gptserve-ignored"] == "tools.web_search"
    assert counted.json()["input_tokens"] == respond(with_tools, **asked).json()["usage"]["input_tokens"]


def test_the_conversation_that_an_input_goes_on_counts(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("Yé.", then_eos=True)))
    first = post(server).json()
    goes_on = {"previous_response_id": first["id"], "input": "And?"}
    counted = server.request("POST", f"{PATH}/input_tokens", json=goes_on).json()["input_tokens"]
    assert counted == post(server, **goes_on).json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"input": None}, 400, "input", "input is required"),
        ({"seed": 2**63}, 400, "seed", "seed must be in [-2**63, 2**63), got 9223372036854775808"),
        ({"temperature": 9}, 400, "temperature", "temperature must be in [0.0, 2.0], got 9.0"),
        ({"model": "other"}, 404, "model", "model 'other' does not exist; this server has 'test-model'"),
        ({"tools": [AGENTS, AGENTS]}, 400, "tools",
         "tools[1].tools[0].name must differ from the others, got 'agents__close' twice"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "x"}}, 400, "tool_choice",
         "tool_choice.name must be that of a tool, got 'x'"),
        ({"input": "x" * 60_000}, 400, "input",
         "The prompt is too long. This model's maximum context length is 4096 tokens, which no more than 53248 bytes "
         "can fit; the prompt has 60037"),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused(
    make_api: Any, body: dict[str, Any], status: int, param: str, message: str
) -> None:
    refused = count(api_of(make_api, "hermes"), **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert refused.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/v1/responses/compact", "compaction of a conversation (truncation auto is another way)"),
        ("POST", "/v1/conversations", "a conversation object (previous_response_id is another way)"),
        ("GET", "/v1/conversations/conv_1", "a conversation object (previous_response_id is another way)"),
        ("DELETE", "/v1/conversations/conv_1/items/x", "a conversation object (previous_response_id is another way)"),
    ],
)
def test_routes_that_this_server_lacks_say_so(api: Api, method: str, path: str, what: str) -> None:
    refused = api.request(method, path)
    message = f"{what} is not supported by this server: there is no {path}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
    assert (refused.status_code, refused.json()) == (404, {"error": error})
