from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import Api
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient


def test_choices_are_numbered_prompt_by_prompt(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), priority_scheduling=True)
    body = api.complete(prompt=["a", "bc"], n=3, seed=7, priority=-2, cache_salt="mine").json()
    requests = api.engine.submitted
    assert [request.prompt_token_ids for request in requests] == [(97,)] * 3 + [(98, 99)] * 3
    assert [request.choice_index for request in requests] == [0, 1, 2, 0, 1, 2], "a prompt's choices are its own"
    assert {(request.seed, request.priority, request.cache_salt) for request in requests} == {(7, -2, "mine")}
    assert [request.request_id for request in requests] == [f"{body['id']}-{i}" for i in range(6)]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))


def test_a_missing_seed_is_drawn_and_told(api: Api) -> None:
    seeds = [api.complete(prompt="a").json()["seed"] for _ in range(2)]
    assert seeds == [request.seed for request in api.engine.submitted]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_a_given_seed_is_told(api: Api) -> None:
    assert api.complete(prompt="a", seed=2**63 - 1).json()["seed"] == 2**63 - 1


@pytest.mark.some(2)
@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_text_and_ids_are_the_same_prompt(api: Api, prompt: object) -> None:
    assert api.complete(prompt=prompt, echo=True, max_tokens=1).json()["choices"][0]["text"] == "aba"
    assert api.engine.submitted[0].prompt_token_ids == (97, 98)


@pytest.mark.parametrize(("add_special_tokens", "begin"), [(None, (1,)), (True, (1,)), (False, ())])
def test_the_text_of_a_special_token_is_that_token(
    make_api: Callable[..., Api], add_special_tokens: bool | None, begin: tuple[int, ...]
) -> None:
    api = make_api(FakeEngineClient(), ByteTokenizer(begin=[1]))
    body = {"prompt": "a<|endoftext|>", "add_special_tokens": add_special_tokens}
    api.complete(**body)
    assert api.engine.submitted[0].prompt_token_ids == (*begin, 97, EOS)
    assert api.request("POST", "/tokenize", json=body).json()["tokens"] == [*begin, 97, EOS]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(_self: object, text: str, *, template: bool = False) -> list[int]:
        raise AssertionError("tokenized")

    most = INFO.max_model_len * ByteTokenizer.max_token_bytes
    monkeypatch.setattr(ByteTokenizer, "encode_with_special", encode)
    response = api.complete(prompt="é" * (most // 2 + 1))
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "The prompt is too long. This model's maximum context length is 256 tokens, "
        f"which no more than {most} bytes can fit; "
        f"the prompt has {most + 2}",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("priority", [-(2**31), -1, 1, 2**31])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a_priority_is_for_servers_that_schedule_by_it(make_api: Callable[..., Api], route: str, priority: int) -> None:
    api = make_api(FakeEngineClient())
    response = getattr(api, route)(**({"prompt": "x"} if route == "complete" else {}), priority=priority)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": f"priority must be 0 unless the server was started with --priority-scheduling, got {priority}",
        "type": "invalid_request_error",
        "param": "priority",
        "code": "invalid_value",
    }
    assert api.engine.submitted == []


@pytest.mark.parametrize(
    ("allowed", "priority"), [(False, 0), (False, None), (True, 0), (True, None), (True, 2**31 - 1)]
)
def test_priority_0_asks_for_nothing(make_api: Callable[..., Api], allowed: bool, priority: int | None) -> None:
    api = make_api(FakeEngineClient(), priority_scheduling=allowed)
    assert api.complete(prompt="x", priority=priority).status_code == 200
    assert [request.priority for request in api.engine.submitted] == [priority or 0]


def test_a_priority_has_a_range(make_api: Callable[..., Api]) -> None:
    error = make_api(FakeEngineClient(), priority_scheduling=True).complete(prompt="x", priority=2**31).json()["error"]
    assert error["message"] == f"priority must be in [{-(2**31)}, {2**31 - 1}], got {2**31}"


TOKENS_RULE = "n times the number of prompts times max_tokens may be at most"
LOGPROBS_RULE = (
    "n times the number of prompts times max_tokens times (logprobs + 1), plus n times the prompts' tokens times "
    "(prompt_logprobs + 1), may be at most 60"
)
BOUNDS = {"max_tokens_held": 300, "max_logprobs_held": 60}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 6, "max_tokens": 51}, "max_tokens", f"{TOKENS_RULE} 300, got 6 times 1 times 51"),
        ({"n": 3, "prompt": ["a", "b"], "max_tokens": 51}, "max_tokens", f"{TOKENS_RULE} 300, got 3 times 2 times 51"),
        ({"max_tokens": 61, "logprobs": 0}, "logprobs", f"{LOGPROBS_RULE}, got 61 + 0"),
        ({"max_tokens": 3, "logprobs": 20}, "logprobs", f"{LOGPROBS_RULE}, got 63 + 0"),
        ({"n": 2, "max_tokens": 7, "prompt": ["a"] * 3, "logprobs": 1}, "logprobs", f"{LOGPROBS_RULE}, got 84 + 0"),
        ({"prompt": "x" * 61, "prompt_logprobs": 0}, "prompt_logprobs", f"{LOGPROBS_RULE}, got 0 + 61"),
        ({"prompt": ["x", "yz"], "n": 3, "prompt_logprobs": 6}, "prompt_logprobs", f"{LOGPROBS_RULE}, got 0 + 63"),
        ({"prompt": "x" * 30, "echo": True, "logprobs": 1}, "logprobs", f"{LOGPROBS_RULE}, got 2 + 60"),
        (
            {"prompt": "x" * 31, "echo": True, "logprobs": 1, "max_tokens": 0},
            "logprobs",
            f"{LOGPROBS_RULE}, got 2 + 62",
        ),
        (
            {"prompt": "x" * 20, "prompt_logprobs": 1, "logprobs": 1, "max_tokens": 11},
            "prompt_logprobs",
            f"{LOGPROBS_RULE}, got 22 + 40",
        ),
    ],
)
def test_what_one_request_makes_the_server_hold_is_bounded(
    make_api: Callable[..., Api], fields: dict[str, Any], param: str, message: str
) -> None:
    api = make_api(FakeEngineClient(), **BOUNDS)
    for kind in ({}, {"background": True}, *([] if "prompt_logprobs" in fields else [{"stream": True}])):
        response = api.complete(**{"prompt": "x", "max_tokens": 1, **fields, **kind})
        assert response.status_code == 400
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": "invalid_value"}
        assert response.json()["error"] == error
    assert api.engine.submitted == []


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 6, "max_tokens": 50},
        {"max_tokens": 60, "logprobs": 0},
        {"n": 2, "prompt": ["a"] * 3, "max_tokens": 5, "logprobs": 1},
        {"prompt": "x" * 60, "prompt_logprobs": 0, "max_tokens": 60},
        {"prompt": "x" * 29, "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "x" * 10, "max_tokens": 240},
    ],
)
def test_what_is_just_within_the_bounds_is_answered(make_api: Callable[..., Api], fields: dict[str, Any]) -> None:
    api = make_api(FakeEngineClient(), **BOUNDS)
    assert api.complete(**{"prompt": "x", "max_tokens": 1, **fields}).status_code == 200


def test_a_single_choice_may_have_the_whole_context(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), max_tokens_held=10)
    assert api.complete(prompt="x", max_tokens=INFO.max_model_len - 1).status_code == 200
    response = api.complete(prompt="x", n=2, max_tokens=INFO.max_model_len - 1)
    assert response.json()["error"]["message"] == f"{TOKENS_RULE} 256, got 2 times 1 times 255"


def test_what_exceeds_the_context_is_told_so_first(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(), **BOUNDS)
    error = api.complete(prompt="x", n=8, max_tokens=2**40, logprobs=20).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize(
    ("length", "has_workers", "in_thread"), [(100, False, False), (3000, False, True), (100, True, True)]
)
def test_what_takes_long_is_tokenized_beside_the_event_loop(
    make_api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, length: int, has_workers: bool, in_thread: bool
) -> None:
    threads = []
    encode = ByteTokenizer.encode_with_special

    def spy(self: ByteTokenizer, text: str, *, template: bool = False) -> list[int]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return encode(self, text, template=template)

    monkeypatch.setattr(ByteTokenizer, "encode_with_special", spy)
    monkeypatch.setattr(ByteTokenizer, "has_workers", has_workers)
    api = make_api(FakeEngineClient(info=replace(INFO, max_model_len=10_000)))
    threads.clear()  # of what a model's marks are
    assert api.complete(prompt="x" * length).json()["usage"]["prompt_tokens"] == length
    assert threads == [in_thread]
