"""What POST /v1/chat/completions refuses: exact status, code, field and message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from gptserve.server.completions.chat import NO_TEMPLATE
from gptserve.server.schemas.completions import ChatRequest
from gptserve.server.schemas.fields import MAX_IGNORED
from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient
from tests.server.pydantic_says import NO_BOOLEAN, NO_INTEGER, NO_STRING

USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def check(api: Api, body: dict[str, Any], status: int, code: str, param: str | None, message: str) -> None:
    response = api.chat(**body)
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert response.json() == {"error": error}
    assert response.status_code == status
    assert api.engine.submitted == []


ONLY_TEXT = "input should be a text part: only text is served, also of a model that sees"
CONTENT = "input should be a string or a list of text parts"
INVALID_TYPES = [
    ({"messages": "hi"}, "messages", "messages: input should be an array, got 'hi'"),
    ({"messages": ["hi"]}, "messages", "messages[0]: input should be an object, got 'hi'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", f"messages[0].content: {CONTENT}, got 5"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages",
     "messages[0].content[0]: input should be an object, got 'hi'"),
    ({"messages": [{**USER, "name": 5}]}, "messages", f"messages[0].name: {NO_STRING}, got 5"),
    ({"logprobs": 5}, "logprobs", f"logprobs: {NO_BOOLEAN}, got 5"),
    ({"top_logprobs": True}, "top_logprobs", f"top_logprobs: {NO_INTEGER}, got true"),
    ({"prompt_logprobs": True}, "prompt_logprobs", f"prompt_logprobs: {NO_INTEGER}, got true"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "chat_template_kwargs: input should be an object, got []"),
    ({"stop": 5}, "stop", "stop: input should be a string or a list of strings, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), INVALID_TYPES)
def test_a_wrong_type(refusing_api: Api, body: dict[str, Any], param: str, message: str) -> None:
    check(refusing_api, body, 400, "invalid_type", param, message)


INVALID_VALUES = [
    ({"messages": []}, "messages", "messages: list should have at least 1 item, not 0, got []"),
    ({"messages": [{"role": "assistants", "content": "x"}]}, "messages",
     "messages[0].role: unknown role 'assistants'; did you mean assistant?"),
    ({"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "messages",
     f"messages[1].content[1]: {ONLY_TEXT}, got {{'type': 'image_url'}}"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages",
     f"messages[0].content[0]: {ONLY_TEXT}, got {{'type': 'input_audio'}}"),
    ({"max_completion_tokens": 0}, "max_completion_tokens",
     "max_completion_tokens must be at least 1, got 0"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens",
     "max_completion_tokens must be max_tokens, which is 5, got 6"),
    ({"top_logprobs": 1}, "top_logprobs", "top_logprobs may be given only with logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs",
     "top_logprobs: input should be less than or equal to 20, got 21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs",
     "top_logprobs: input should be greater than or equal to 0, got -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs",
     "prompt_logprobs: input should be less than or equal to 20, got 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs",
     "prompt_logprobs: input should be greater than or equal to 0, got -1"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
     "continue_final_message must not be true together with add_generation_prompt"),
    ({"chat_template_kwargs": {"tools": [], "documents": []}}, "chat_template_kwargs",
     "chat_template_kwargs must not hold documents, which the server gives"),
    ({"temperature": 3}, "temperature", "temperature must be in [0.0, 2.0], got 3.0"),
    ({"seed": 2**63}, "seed", f"seed must be in [-2**63, 2**63), got {2**63}"),
    ({"n": 129}, "n", "n times the number of prompts may be at most 128, got 129 times 1"),
    ({"stream_options": {}}, "stream_options", "stream_options may be given only with stream true"),
    ({"stop_token_ids": [257]}, "stop_token_ids", "stop_token_ids: token ids must be in [0, 257), got 257"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), INVALID_VALUES)
def test_an_invalid_value(refusing_api: Api, body: dict[str, Any], param: str, message: str) -> None:
    check(refusing_api, body, 400, "invalid_value", param, message)


@pytest.mark.parametrize(
    ("body", "param", "lack"),
    [
        ({"functions": [{}]}, "functions", "an older spelling of tools is"),
        ({"function_call": {"name": "f"}}, "function_call", "an older spelling of tools is"),
        ({"modalities": ["text", "audio"]}, "modalities", "media other than text are"),
        ({"audio": {}}, "audio", "media other than text are"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "a chat template of the request is"),
        ({"messages": [{**USER, "audio": {"id": "1"}}]}, "messages.audio", "media other than text are"),
        ({"moderation": {"model": "m"}}, "moderation", "moderation is"),
    ],
)
def test_what_the_server_cannot_do_is_refused_in_words(
    refusing_api: Api, body: dict[str, Any], param: str, lack: str
) -> None:
    message = f"{lack} not supported by this server; leave out {param}"
    check(refusing_api, body, 400, "unsupported_parameter", param, message)


@pytest.mark.parametrize(("name", "value"), [("prompt", "x"), ("echo", True)])
def test_a_field_of_completions_is_refused(refusing_api: Api, name: str, value: object) -> None:
    check(refusing_api, {name: value}, 400, "unknown_parameter", name, f"{name} is not a field of this route")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_a_missing_field(refusing_api: Api, message: dict[str, Any], param: str) -> None:
    check(refusing_api, {"messages": [message]}, 400, "missing_required_parameter", param, f"{param} is required")


def test_messages_are_required(refusing_api: Api) -> None:
    response = refusing_api.request("POST", "/v1/chat/completions", json={})
    assert response.json()["error"] == {
        "message": "messages is required",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "missing_required_parameter",
    }


def test_an_unknown_model(refusing_api: Api) -> None:
    message = "model 'gpt-9' does not exist; this server has 'test-model'"
    check(refusing_api, {"model": "gpt-9"}, 404, "model_not_found", "model", message)


CONTEXT = "is too long. This model's maximum context length is 256 tokens"
TOO_LONG = [
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages",
     f"The prompt {CONTEXT}, with a new one; the prompt has 308"),
    ({"max_tokens": 300}, "max_tokens",
     f"max_tokens or the prompt {CONTEXT}; the prompt has 10 and max_tokens is 300, together 310"),
    ({"max_completion_tokens": 300}, "max_completion_tokens",
     f"max_tokens or the prompt {CONTEXT}; the prompt has 10 and max_tokens is 300, together 310"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), TOO_LONG)
def test_what_exceeds_the_context(refusing_api: Api, body: dict[str, Any], param: str, message: str) -> None:
    check(refusing_api, body, 400, "context_length_exceeded", param, message)


def test_a_model_without_a_template_says_what_to_do(make_api: Callable[..., Api]) -> None:
    assert "--chat-template FILE or --chat-template plain" in NO_TEMPLATE
    check(make_api(FakeEngineClient(), template=None), {}, 400, "no_chat_template", None, NO_TEMPLATE)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "refuses this conversation: Roles must alternate!"),
        ("{{ messages[0].__class__.__mro__ }}",
         "refuses this conversation: access to attribute '__class__' of 'dict' object is unsafe."),
        ("{% for i in range(10 ** 6) %}{% endfor %}",
         "refuses this conversation: OverflowError: Range too big. "
         "The sandbox blocks ranges larger than MAX_RANGE (100000)."),
        ("{{ 'x' * 10 ** 9 }}", "refuses this conversation: it needed more than 512 MiB of memory"),
        ("{% if %}", "is not valid: Expected an expression, got 'end of statement block'"),
    ],
)  # fmt: skip
def test_what_the_template_refuses_is_told_in_its_words(
    make_api: Callable[..., Api], template: str, message: str
) -> None:
    api = make_api(FakeEngineClient(), template=template)
    check(api, {}, 400, "invalid_chat_template_input", "messages", f"the chat template {message}")


def test_an_empty_prompt(make_api: Callable[..., Api]) -> None:
    message = "prompt must hold at least one token, got an empty one"
    check(make_api(FakeEngineClient(), template="{{ x }}"), {}, 400, "invalid_value", "messages", message)


def test_a_full_queue_is_a_429(api: Api) -> None:
    api.engine.max_requests = 0
    response = api.chat(max_tokens=1)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


def test_a_draining_server_lets_no_chat_in(api: Api) -> None:
    api.app.state.lifecycle.drain()
    assert api.chat().status_code == 503


MASSES = {
    "messages": ({"messages": [USER, *[{}] * 15_000]}, "messages[1].role"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, *[{}] * 15_000]}]},
        "messages[0].content[1].type",
    ),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "body",
    [
        {f"k{i}": 0 for i in range(60_000)},
        {"messages": [{**USER, **{f"k{i}": 0 for i in range(60_000)}}]},
        {"stream": True, "stream_options": {f"k{i}": 0 for i in range(60_000)}},
    ],
    ids=["of the body", "of a message", "of options"],
)
def test_masses_of_unknown_fields_are_refused(make_api: Callable[..., Api], body: dict[str, Any]) -> None:
    error = make_api(FakeEngineClient(), max_body_bytes=10**7).chat(**body).json()["error"]
    assert error["message"] == f"the body may have at most {MAX_IGNORED} unknown fields"


@pytest.mark.some(1)
@pytest.mark.parametrize(("body", "param"), MASSES.values(), ids=MASSES)
def test_of_masses_only_the_first_that_is_wrong_is_looked_at(
    make_api: Callable[..., Api], body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    validate = ChatRequest.model_validate

    def watch(value: Any) -> ChatRequest:
        try:
            return validate(value)
        except ValidationError as error:
            seen.append(error.error_count())
            raise

    monkeypatch.setattr(ChatRequest, "model_validate", watch)
    response = make_api(FakeEngineClient(), max_body_bytes=10**7).chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert seen[0] <= 2
