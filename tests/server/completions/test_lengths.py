"""How long answers may be. What one request may hold is in test_plan.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Api
from tests.server.fake_engine import INFO, FakeEngineClient

LIMIT = INFO.max_model_len
NAMES = [
    ("complete", "max_tokens"),
    ("complete", "max_completion_tokens"),
    ("chat", "max_tokens"),
    ("chat", "max_completion_tokens"),
]
MakeApi = Callable[..., Api]


def ask(api: Api, route: str, **fields: Any) -> Any:
    return getattr(api, route)(**{**({"prompt": "xy"} if route == "complete" else {}), **fields})


@pytest.mark.some(3)
@pytest.mark.parametrize(("route", "name"), NAMES)
@pytest.mark.parametrize("kind", [{}, {"stream": True}, {"background": True}])
def test_minus_one_asks_for_what_the_context_leaves(api: Api, route: str, name: str, kind: dict[str, Any]) -> None:
    assert ask(api, route, **{name: -1}, **kind).is_success
    [request] = api.engine.submitted
    assert len(request.prompt_token_ids) + request.params.max_tokens == LIMIT


def test_the_longest_prompt_leaves_least(api: Api) -> None:
    assert ask(api, "complete", prompt=["x", "x" * 100], max_tokens=-1).is_success
    assert [request.params.max_tokens for request in api.engine.submitted] == [LIMIT - 100] * 2


def test_minus_one_with_echo_is_no_zero(api: Api) -> None:
    body = ask(api, "complete", max_tokens=-1, echo=True).json()
    assert body["choices"][0]["text"].startswith("xyabc")
    assert body["usage"]["completion_tokens"] == LIMIT - 2


def test_minus_one_keeps_to_the_models_own_limit_of_chats(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), max_new_tokens=9)
    assert ask(api, "chat", max_tokens=-1).json()["usage"]["completion_tokens"] == 9


@pytest.mark.some(3)
@pytest.mark.parametrize(("route", "name"), NAMES)
@pytest.mark.parametrize("value", [0, -2])
def test_no_other_number_below_one_is_a_limit(api: Api, route: str, name: str, value: int) -> None:
    error = ask(api, route, **{name: value}).json()["error"]
    assert error == {
        "message": f"{name} must be at least 1, got {value}",
        "type": "invalid_request_error",
        "param": name,
        "code": "invalid_value",
    }


def test_a_prompt_may_be_cut_beside_a_completion_without_a_limit(api: Api) -> None:
    assert ask(api, "complete", prompt="x" * 300, max_tokens=-1, truncate_prompt_tokens=-1).is_success
    [request] = api.engine.submitted
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (LIMIT - 1, 1)


CAP = {"overlong_max_tokens": "cap"}
HEADER = "x-gptserve-max-tokens"
LONG = {"complete": {"prompt": "x" * 300}, "chat": {"messages": [{"role": "user", "content": "x" * 300}]}}


@pytest.mark.some(2)
@pytest.mark.parametrize(("route", "name"), NAMES)
@pytest.mark.parametrize(
    ("asked", "limit", "kept", "in_force"),
    [
        (100, 300, 100, LIMIT - 100),
        (100, 200, 100, LIMIT - 100),
        (100, 50, 100, 50),
        (-1, LIMIT, LIMIT - 1, 1),
        (-1, 200, LIMIT - 200, 200),
        (LIMIT - 1, 50, LIMIT - 1, 1),
    ],
)
def test_a_prompt_may_be_cut_beside_a_limit_that_is_capped(
    make_api: MakeApi, route: str, name: str, asked: int, limit: int, kept: int, in_force: int
) -> None:
    api = make_api(FakeEngineClient(), **CAP)
    response = ask(api, route, **LONG[route], **{name: limit}, truncate_prompt_tokens=asked)
    assert response.is_success, response.text
    [request] = api.engine.submitted
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (kept, in_force)
    assert response.headers.get(HEADER) == (None if in_force == limit else str(in_force))


@pytest.mark.some(4)
@pytest.mark.parametrize(("route", "name"), NAMES)
@pytest.mark.parametrize(
    ("options", "limit", "most"), [(CAP, 300, 255), (CAP, 9, 255), ({}, 300, 255), ({}, 256, 255), ({}, 250, 6)]
)
@pytest.mark.parametrize("asked", [-5, 0, LIMIT])
def test_no_other_number_of_tokens_is_kept_whatever_the_limit(
    make_api: MakeApi, route: str, name: str, options: dict[str, str], limit: int, most: int, asked: int
) -> None:
    api = make_api(FakeEngineClient(), **options)
    error = ask(api, route, **LONG[route], **{name: limit}, truncate_prompt_tokens=asked).json()["error"]
    assert (error["param"], error["message"]) == (
        "truncate_prompt_tokens",
        f"truncate_prompt_tokens must be -1 or in [1, {most}], got {asked}",
    )
    assert api.engine.submitted == []


@pytest.mark.some(3)
@pytest.mark.parametrize(("route", "name"), NAMES)
@pytest.mark.parametrize("kind", [{}, {"stream": True}, {"background": True}])
def test_a_limit_that_does_not_fit_may_be_capped(
    make_api: MakeApi, route: str, name: str, kind: dict[str, Any]
) -> None:
    api = make_api(FakeEngineClient(), **CAP)
    response = ask(api, route, **{name: 10**6}, **kind)
    assert response.is_success
    [request] = api.engine.submitted
    assert len(request.prompt_token_ids) + request.params.max_tokens == LIMIT
    assert response.headers[HEADER] == str(request.params.max_tokens)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", [{}, {"stream": True}, {"background": True}, {"store": False}])
def test_the_limit_of_a_response_is_capped_too(make_api: MakeApi, kind: dict[str, Any]) -> None:
    api = make_api(FakeEngineClient(), **CAP)
    body = {"input": "hi", "max_output_tokens": 10**6, **kind}
    response = api.request("POST", "/v1/responses", json=body)
    assert response.is_success
    [request] = api.engine.submitted
    assert len(request.prompt_token_ids) + request.params.max_tokens == LIMIT
    assert response.headers[HEADER] == str(request.params.max_tokens)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": -1}, {"max_tokens": 9}, {"max_tokens": LIMIT - 10}])
def test_a_limit_that_fits_is_left_as_it_is(make_api: MakeApi, limit: dict[str, int]) -> None:
    api = make_api(FakeEngineClient(), **CAP)
    response = api.chat("hi", **limit)
    assert (response.status_code, HEADER in response.headers) == (200, False)
    assert response.json()["usage"]["completion_tokens"] == (limit if limit.get("max_tokens", -1) > 0 else {}).get(
        "max_tokens", LIMIT - 10
    )


def test_a_cap_never_cuts_a_prompt(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), **CAP)
    for response in (ask(api, "complete", prompt="x" * LIMIT, max_tokens=9), api.chat("x" * LIMIT, max_tokens=9)):
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert api.engine.submitted == []


def test_a_cap_leaves_no_room_for_more_tokens_than_must_come(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), **CAP)
    error = ask(api, "complete", prompt="x" * (LIMIT - 5), max_tokens=500, min_tokens=6).json()["error"]
    assert (error["param"], error["message"]) == (
        "min_tokens",
        "min_tokens must be at most max_tokens, which is 5, got 6",
    )


def test_without_a_cap_a_limit_that_does_not_fit_is_refused(api: Api) -> None:
    assert ask(api, "chat", max_tokens=10**6).json()["error"]["code"] == "context_length_exceeded"
