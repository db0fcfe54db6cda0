"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gptserve.server.api import tokenize
from gptserve.server.schemas.tokens import DetokenizedText, TokenizerInfo, Tokens
from tests.server.conftest import MODEL, Api
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient
from tests.server.pydantic_says import NO_BOOLEAN, NO_INTEGER, NO_STRING

MakeApi = Callable[..., Api]
BOS = 7
ROUTES = [("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info")]


def post(api: Api, path: str, **body: Any) -> httpx.Response:
    return api.request("POST", path, json=body)


def answer(api: Api, path: str, **body: Any) -> dict[str, Any]:
    response = post(api, path, **body)
    assert response.status_code == 200, response.json()
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture
def begun(make_api: MakeApi) -> Api:
    """An application whose prompts begin with BOS."""
    return make_api(FakeEngineClient(), tokenizer=ByteTokenizer(begin=[BOS]), tokenizer_info={"tokenizer_class": "T"})


def test_a_text_becomes_tokens(begun: Api) -> None:
    body = answer(begun, "/tokenize", prompt="é<|endoftext|>", model=MODEL)
    Tokens.model_validate(body, strict=True, extra="forbid")
    assert body == {"count": 4, "max_model_len": 256, "tokens": [BOS, 0xC3, 0xA9, EOS], "token_strs": None}
    assert answer(begun, "/tokenize", prompt="x", add_special_tokens=False)["tokens"] == [120]
    assert answer(begun, "/tokenize", prompt="", add_special_tokens=False)["count"] == 0


def test_the_texts_of_tokens_come_where_they_are_asked_for(begun: Api) -> None:
    body = answer(begun, "/tokenize", prompt="éa", add_special_tokens=False, return_token_strs=True)
    Tokens.model_validate(body, strict=True, extra="forbid")
    assert body["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]


def test_a_conversation_becomes_the_tokens_of_its_chat(begun: Api) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "y"}]
    names = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
    for fields in ({}, *({name: value} for name in names for value in (True, False))):
        body = answer(begun, "/tokenize", messages=messages, **fields)
        begun.chat(messages=messages, **fields)
        assert body["tokens"] == list(begun.engine.submitted[-1].prompt_token_ids), fields
        assert body["count"] == len(body["tokens"])


def test_tokens_become_text(begun: Api) -> None:
    body = answer(begun, "/detokenize", tokens=[0xC3, 0xA9, EOS, 0xE2], model=MODEL)
    DetokenizedText.model_validate(body, strict=True, extra="forbid")
    assert body == {"prompt": "é<|endoftext|>\ufffd"}
    assert answer(begun, "/detokenize", tokens=[]) == {"prompt": ""}


def test_the_tokenizer_is_described(make_api: MakeApi, begun: Api) -> None:
    info = begun.get("/tokenizer_info").json()
    TokenizerInfo.model_validate(info, strict=True)
    assert info["tokenizer_class"] == "T"
    assert info["eos_token"] == "<|endoftext|>"
    assert "[{{ m.role }}]" in info["chat_template"]
    plain = make_api(FakeEngineClient(info=replace(INFO, eos_token_ids=())), template=None)
    assert plain.get("/tokenizer_info").json() == {"tokenizer_class": "unknown"}
    named = make_api(FakeEngineClient(), tokenizer_info={"tokenizer_class": "T", "eos_token": "</s>"}, template=None)
    assert named.get("/tokenizer_info").json()["eos_token"] == "</s>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 2001}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [120] * 2001}),
    ],
)
def test_what_may_take_long_runs_beside_the_event_loop(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads, render = [], tokenize.json_response

    def spy(found: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return render(found)

    monkeypatch.setattr(tokenize, "json_response", spy)
    api = make_api(FakeEngineClient(info=replace(INFO, max_model_len=4096)))
    assert answer(api, path, **body)
    assert threads == [True]


TOO_LONG = (
    "The prompt is too long. This model's maximum context length is 256 tokens, "
    "which no more than 3328 bytes can fit; the prompt has 3329"
)
REFUSED = [
    ("/tokenize", {}, 400, "missing_required_parameter", "prompt", "prompt is required"),
    ("/tokenize", {"prompt": 5}, 400, "invalid_type", "prompt", f"prompt: {NO_STRING}, got 5"),
    ("/tokenize", {"prompt": ["x"]}, 400, "invalid_type", "prompt",
     f"prompt: {NO_STRING}, got ['x']"),
    ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model_not_found", "model",
     "model 'gpt-9' does not exist; this server has 'test-model'"),
    ("/tokenize", {"prompt": "x" * 3329}, 400, "context_length_exceeded", "prompt", TOO_LONG),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "invalid_type", "return_token_strs",
     f"return_token_strs: {NO_BOOLEAN}, got 1"),
    ("/tokenize", {"messages": []}, 400, "invalid_value", "messages",
     "messages: list should have at least 1 item, not 0, got []"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True,
                   "add_generation_prompt": True}, 400, "invalid_value", "continue_final_message",
     "continue_final_message must not be true together with add_generation_prompt"),
    ("/detokenize", {}, 400, "missing_required_parameter", "tokens", "tokens is required"),
    ("/detokenize", {"tokens": "x"}, 400, "invalid_type", "tokens", "tokens: input should be an array, got 'x'"),
    ("/detokenize", {"tokens": [1, "x"]}, 400, "invalid_type", "tokens",
     f"tokens[1]: {NO_INTEGER}, got 'x'"),
    ("/detokenize", {"tokens": [1, 257]}, 400, "invalid_value", "tokens",
     "tokens: token ids must be in [0, 257), got 257"),
    ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens", "tokens: token ids must be in [0, 257), got -1"),
    ("/detokenize", {"tokens": [1] * 257}, 400, "context_length_exceeded", "tokens",
     "tokens may be at most 256, this model's context, got 257"),
    ("/detokenize", {"tokens": [1], "model": ""}, 404, "model_not_found", "model",
     "model '' does not exist; this server has 'test-model'"),
]  # fmt: skip


@pytest.mark.some(4)
@pytest.mark.parametrize(("path", "body", "status", "code", "param", "message"), REFUSED)
def test_what_is_refused(
    api: Api, path: str, body: dict[str, Any], status: int, code: str, param: str, message: str
) -> None:
    response = post(api, path, **body)
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert (response.status_code, response.json()) == (status, {"error": error})


def test_a_model_without_a_template_has_no_tokens_of_conversations(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template=None)
    response = post(api, "/tokenize", messages=[{"role": "user", "content": "x"}])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chat_template")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_an_engine_nothing_is_known(make_api: MakeApi, method: str, path: str) -> None:
    engine = FakeEngineClient()
    engine.is_alive = False
    response = make_api(engine).request(method, path, json={})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_key_is_needed_where_completions_need_one(make_api: MakeApi, method: str, path: str) -> None:
    api = make_api(FakeEngineClient(), api_keys=("k",))
    assert api.request(method, path, json={}).status_code == 401
