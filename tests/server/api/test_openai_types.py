"""Every field of the requests that OpenAI's client knows, from its own types: read, taken for nothing, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest
from gptserve.server.schemas.fields import take_fields
from tests.server.conftest import Api

Given = dict[str, Any]
Wrap = Callable[[Given], Given]
SOMETHING = {"x": ["y"]}
"""A value that asks for something wherever that may be. Its own field x is unknown."""


def names_of(*types: type) -> set[str]:
    return {name for typed in types for name in get_type_hints(typed)}


def message(given: Given, role: str = "assistant") -> Given:
    return {"messages": [{"role": role, **given}]}


def call(given: Given) -> Given:
    return message({"tool_calls": [given]})


def unknown_of(given: Given, model: type[BaseModel]) -> list[str]:
    """Return the fields that nobody knows; none if a field is refused as one that is not supported."""
    try:
        _, ignored = take_fields(given, model)
    except InvalidRequestError as error:
        return [] if error.code == "unsupported_parameter" else [str(error)]
    return [field for field in ignored if not field.endswith(".x")]


PARTS: list[tuple[type, str]] = [
    (chat.ChatCompletionContentPartTextParam, "text"),
    (chat.ChatCompletionContentPartRefusalParam, "refusal"),
]
OF_CHATS: list[tuple[type, Wrap]] = [
    (chat_create_params.CompletionCreateParamsNonStreaming, dict),
    (chat_create_params.CompletionCreateParamsStreaming, dict),
    (chat.ChatCompletionStreamOptionsParam, lambda given: {"stream_options": given}),
    (chat.ChatCompletionSystemMessageParam, lambda given: message(given, "system")),
    (chat.ChatCompletionDeveloperMessageParam, lambda given: message(given, "developer")),
    (chat.ChatCompletionUserMessageParam, lambda given: message(given, "user")),
    (chat.ChatCompletionAssistantMessageParam, message),
    (chat.ChatCompletionToolMessageParam, lambda given: message(given, "tool")),
    (chat.ChatCompletionFunctionMessageParam, lambda given: message(given, "function")),
    *((part, lambda given, kind=kind: message({"content": [{"type": kind, **given}]})) for part, kind in PARTS),
    (chat.ChatCompletionMessageFunctionToolCallParam, call),
    (chat.chat_completion_message_function_tool_call_param.Function, lambda given: call({"function": given})),
    (chat.ChatCompletionFunctionToolParam, lambda given: {"tools": [given]}),
    (shared_params.FunctionDefinition, lambda given: {"tools": [{"function": given}]}),
    (chat.ChatCompletionNamedToolChoiceParam, lambda given: {"tool_choice": given}),
    (shared_params.ResponseFormatJSONSchema, lambda given: {"response_format": given}),
    (
        shared_params.response_format_json_schema.JSONSchema,
        lambda given: {"response_format": {"type": "json_schema", "json_schema": given}},
    ),
]
OF_COMPLETIONS: list[tuple[type, Wrap]] = [
    (completion_create_params.CompletionCreateParamsNonStreaming, dict),
    (completion_create_params.CompletionCreateParamsStreaming, dict),
]
CASES = [
    pytest.param(model, wrap, name, id=f"{model.__name__}-{typed.__name__}-{name}")
    for model, types in ((ChatRequest, OF_CHATS), (CompletionRequest, OF_COMPLETIONS))
    for typed, wrap in types
    for name in sorted(names_of(typed) - {"role"})
]


@pytest.mark.parametrize(("model", "wrap", "name"), CASES)
def test_no_field_is_unknown(model: type[BaseModel], wrap: Wrap, name: str) -> None:
    assert unknown_of(wrap({name: SOMETHING}), model) == []


def test_an_unknown_field_would_be_noticed() -> None:
    assert unknown_of(message({"strange": 1}), ChatRequest) == ["messages.strange"]
    assert unknown_of({"tol_choice": 1}, ChatRequest) == ["unknown field tol_choice; did you mean tool_choice?"]


def test_the_types_have_fields() -> None:
    names = {name for typed, _ in OF_CHATS for name in names_of(typed)}
    assert {"messages", "prompt_cache_options", "refusal", "function_call", "strict", "include_usage"} <= names


@pytest.mark.parametrize("name", ["content", "tool_call_id", "name", "refusal"])
def test_what_messages_have_reaches_the_model(api: Api, name: str) -> None:
    """Not every template shows all of it; the one of this test shows content alone."""
    given = {"role": "assistant", "content": "said", name: "told"}
    asked = [{"role": "user", "content": "hi"}, given]
    assert api.chat(messages=asked).status_code == 200
    prompt = bytes(id_ for id_ in api.engine.submitted[-1].prompt_token_ids if id_ < 256).decode()
    assert prompt == "[user]hi[assistant]" + {"content": "told", "refusal": "said\ntold"}.get(name, "said") + ">"
