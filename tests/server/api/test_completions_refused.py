"""What POST /v1/completions refuses: exact status, code, field and message, while another stream goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from gptserve.server.schemas.completions import CompletionRequest
from gptserve.server.schemas.fields import MAX_IGNORED
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import INFO, FakeEngineClient
from tests.server.pydantic_says import NO_BOOLEAN, NO_INTEGER, NO_NUMBER, NO_STRING

TYPE = "invalid_request_error"


class Bystander:
    """A server with a stream of somebody else's that never ends."""

    def __init__(self, server: LiveServer, lines: Iterator[str]) -> None:
        self.server = server
        self._lines = lines
        self._num_seen = 0

    def post(self, content: bytes, content_type: str = "application/json") -> httpx.Response:
        headers = {"content-type": content_type}
        return httpx.post(self.server.url + "/v1/completions", content=content, headers=headers, timeout=20)

    def goes_on(self) -> bool:
        """Compute the stream's next token and see it arrive."""
        engine = self.server.engine
        engine.from_outside(engine.step)
        line = next(line for line in self._lines if line.startswith("data: "))
        self._num_seen += 1
        text: str = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text == "abc"[(self._num_seen - 1) % 3] and len(engine.live_ids) == 1


@pytest.fixture(scope="module")
def bystander() -> Iterator[Bystander]:
    engine = FakeEngineClient(auto=False)
    with LiveServer(engine).running() as server:
        body = {"prompt": "x", "stream": True, "max_tokens": 250}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as response:
            yield Bystander(server, response.iter_lines())


def refusal(bystander: Bystander, content: bytes, status: int, code: str, param: str | None) -> str:
    """Return the message of a refusal that has all else as given and disturbs nobody."""
    num_submitted = len(bystander.server.engine.submitted)
    response = bystander.post(content)
    error = response.json()["error"]
    message: str = error.pop("message")
    assert error == {"type": TYPE, "param": param, "code": code}, message
    assert response.status_code == status
    assert response.headers["x-request-id"]
    assert len(bystander.server.engine.submitted) == num_submitted
    assert bystander.goes_on()
    return message


def check(bystander: Bystander, content: bytes, status: int, code: str, param: str | None, message: str) -> None:
    assert refusal(bystander, content, status, code, param) == message


INVALID_JSON = {
    "empty body": b"",
    "not a number": b'{"prompt": "x", "x": [NaN]}',
    "infinity": b'{"prompt": "x", "x": [Infinity]}',
    "minus infinity": b'{"prompt": "x", "x": [-Infinity]}',
    "unfinished": b'{"prompt": "x"',
    "two values": b'{"prompt": "x"} 1',
    "deep nesting": b'{"prompt": ' + b"[" * 60_000,
    "a number of 5,000 digits": b'{"n": ' + b"9" * 5000 + b"}",
    "a lone high surrogate": b'{"prompt": "\\ud800"}',
    "a lone high surrogate before text": b'{"prompt": "\\ud83dabc"}',
    "a lone low surrogate": b'{"prompt": "\\udc00"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "bytes that are not UTF-8": b'{"prompt": "\xff"}',
    "a control character": b'{"prompt": "\n"}',
}


@pytest.mark.parametrize("content", INVALID_JSON.values(), ids=INVALID_JSON)
def test_invalid_json(bystander: Bystander, content: bytes) -> None:
    """The parser's own words follow."""
    before, found, reason = refusal(bystander, content, 400, "invalid_json", None).partition(": ")
    assert (before, found) == ("the body is not valid JSON", ": ")
    assert reason.strip()
    assert "\n" not in reason


@pytest.mark.parametrize(("content", "shown"), [(b"[]", "[]"), (b'"x"', "'x'"), (b"1", "1"), (b"null", "null")])
def test_a_body_that_is_no_object(bystander: Bystander, content: bytes, shown: str) -> None:
    message = f"the body: input should be an object, got {shown}"
    check(bystander, content, 400, "invalid_type", None, message)


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data"])
def test_a_wrong_content_type(bystander: Bystander, content_type: str) -> None:
    response = bystander.post(b'{"prompt": "x"}', content_type)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert response.json()["error"]["message"] == f"content-type must be application/json, got {content_type}"
    assert bystander.goes_on()


def test_a_body_of_20_megabytes(bystander: Bystander) -> None:
    message = "the body may have at most 2097152 bytes, got 20000015 bytes"
    check(bystander, b'{"prompt": "x"}' + b" " * 20_000_000, 413, "body_too_large", None, message)


def test_a_missing_prompt(bystander: Bystander) -> None:
    check(bystander, b"{}", 400, "missing_required_parameter", "prompt", "prompt is required")


def test_an_unknown_model(bystander: Bystander) -> None:
    message = "model 'gpt-9' does not exist; this server has 'test-model'"
    check(bystander, b'{"prompt": "x", "model": "gpt-9"}', 404, "model_not_found", "model", message)


PROMPT_RULE = "input should be a string, a list of strings, a list of token ids or a list of lists of token ids"

UNKNOWN_FIELDS = [
    ({"max_token": 5}, "max_token", "unknown field max_token; did you mean max_tokens?"),
    ({"messages": []}, "messages", "messages is not a field of this route"),
    (
        {"stream": True, "stream_options": {"include_use": True}},
        "stream_options.include_use",
        "unknown field stream_options.include_use; did you mean stream_options.include_usage?",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), UNKNOWN_FIELDS)
def test_an_unknown_field(bystander: Bystander, fields: dict[str, Any], param: str, message: str) -> None:
    check(bystander, body_of(fields), 400, "unknown_parameter", param, message)


WRONG_TYPES = [
    ({"prompt": 5}, "prompt", f"prompt: {PROMPT_RULE}, got 5"),
    ({"prompt": {"a": 1}}, "prompt", f"prompt: {PROMPT_RULE}, got {{'a': 1}}"),
    ({"prompt": ["a", 1]}, "prompt", f"prompt[1]: {NO_STRING}, got 1"),
    ({"prompt": [1, "a"]}, "prompt", f"prompt[1]: {NO_INTEGER}, got 'a'"),
    ({"prompt": [1.0]}, "prompt", f"prompt[0]: {NO_INTEGER}, got 1.0"),
    ({"prompt": [True]}, "prompt", f"prompt[0]: {NO_INTEGER}, got true"),
    ({"prompt": [[1], [2, None]]}, "prompt", f"prompt[1][1]: {NO_INTEGER}, got null"),
    ({"model": 5}, "model", f"model: {NO_STRING}, got 5"),
    ({"max_tokens": "5"}, "max_tokens", f"max_tokens: {NO_INTEGER}, got '5'"),
    ({"max_tokens": 1.5}, "max_tokens", f"max_tokens: {NO_INTEGER}, got 1.5"),
    ({"max_tokens": True}, "max_tokens", f"max_tokens: {NO_INTEGER}, got true"),
    ({"max_tokens": [5] * 9}, "max_tokens", f"max_tokens: {NO_INTEGER}, got [5, 5, 5, 5, ...]"),
    ({"temperature": "hot"}, "temperature", f"temperature: {NO_NUMBER}, got 'hot'"),
    ({"temperature": True}, "temperature", f"temperature: {NO_NUMBER}, got true"),
    ({"seed": 1.5}, "seed", f"seed: {NO_INTEGER}, got 1.5"),
    ({"n": True}, "n", f"n: {NO_INTEGER}, got true"),
    ({"logprobs": True}, "logprobs", f"logprobs: {NO_INTEGER}, got true"),
    ({"prompt_logprobs": True}, "prompt_logprobs", f"prompt_logprobs: {NO_INTEGER}, got true"),
    ({"prompt_logprobs": "5"}, "prompt_logprobs", f"prompt_logprobs: {NO_INTEGER}, got '5'"),
    ({"prompt_logprobs": 1e300}, "prompt_logprobs", f"prompt_logprobs: {NO_INTEGER}, got 1e+300"),
    ({"stream": 1}, "stream", f"stream: {NO_BOOLEAN}, got 1"),
    ({"stream": "true"}, "stream", f"stream: {NO_BOOLEAN}, got 'true'"),
    ({"stop": 5}, "stop", "stop: input should be a string or a list of strings, got 5"),
    ({"stop": ["a", 5]}, "stop", f"stop[1]: {NO_STRING}, got 5"),
    ({"stop": [5]}, "stop", f"stop[0]: {NO_STRING}, got 5"),
    ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids: input should be an array, got 5"),
    ({"logit_bias": []}, "logit_bias", "logit_bias: input should be an object, got []"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", f"logit_bias.5: {NO_NUMBER}, got 'x'"),
    ({"stream_options": 1}, "stream_options", "stream_options: input should be an object, got 1"),
    ({"timeout_ms": 1.5}, "timeout_ms", f"timeout_ms: {NO_INTEGER}, got 1.5"),
    ({"background": 1}, "background", f"background: {NO_BOOLEAN}, got 1"),
    ({"user": 5}, "user", f"user: {NO_STRING}, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), WRONG_TYPES)
def test_a_wrong_type(bystander: Bystander, fields: dict[str, Any], param: str, message: str) -> None:
    check(bystander, body_of(fields), 400, "invalid_type", param, message)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize(
    ("number", "shown"),
    [("1e999", "inf"), ("-1e999", "-inf"), ("1E+0309", "inf"), ("9" * 310 + ".5", "inf"), ("9" * 215 + "e95", "inf")],
)
def test_numbers_that_are_not_finite(bystander: Bystander, name: str, number: str, shown: str) -> None:
    content = f'{{"prompt": "x", "{name}": {number}}}'.encode()
    check(bystander, content, 400, "invalid_value", name, f"{name}: input should be a finite number, got {shown}")


def test_a_bias_that_is_not_finite(bystander: Bystander) -> None:
    message = "logit_bias.5: input should be a finite number, got inf"
    check(bystander, b'{"prompt": "x", "logit_bias": {"5": 1e400}}', 400, "invalid_value", "logit_bias", message)


def test_a_number_that_is_not_finite_deep_in_a_field_of_any_kind(bystander: Bystander) -> None:
    content = b'{"prompt": "x", "unknown": [1e30, {"a": {"b": [-1e999]}}, 1e400]}'
    message = "unknown[1].a.b[0]: input should be a finite number, got -inf"
    check(bystander, content, 400, "invalid_value", "unknown", message)


HUGE = 10**400
INVALID_VALUES = [
    ({"prompt": ""}, "prompt", "prompt must hold at least one token, got an empty one"),
    ({"prompt": []}, "prompt", "prompt must hold at least one token, got an empty one"),
    ({"prompt": [[]]}, "prompt", "prompt must hold at least one token, got an empty one"),
    ({"prompt": ["x", ""]}, "prompt", "prompt must hold at least one token, got an empty one"),
    ({"prompt": [97, 257]}, "prompt", "prompt: token ids must be in [0, 257), got 257"),
    ({"prompt": [-1]}, "prompt", "prompt: token ids must be in [0, 257), got -1"),
    ({"prompt": [10**30]}, "prompt", f"prompt: token ids must be in [0, 257), got {10**30}"),
    ({"prompt": ["x"] * 129}, "prompt",
     "prompt: list should have at most 128 items, not 129, got ['x', 'x', 'x', 'x', ...]"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"max_tokens": -5}, "max_tokens", "max_tokens must be at least 1, got -5"),
    ({"temperature": -0.1}, "temperature", "temperature must be in [0.0, 2.0], got -0.1"),
    ({"temperature": 2.5}, "temperature", "temperature must be in [0.0, 2.0], got 2.5"),
    ({"temperature": 1e300}, "temperature", "temperature must be in [0.0, 2.0], got 1e+300"),
    ({"top_p": 0}, "top_p", "top_p must be in (0.0, 1.0], got 0.0"),
    ({"top_p": 1.1}, "top_p", "top_p must be in (0.0, 1.0], got 1.1"),
    ({"top_k": -2}, "top_k", "top_k must be at least 0, got -2"),
    ({"min_p": -1}, "min_p", "min_p must be in [0.0, 1.0], got -1.0"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be in [-2.0, 2.0], got 3.0"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty must be in [-2.0, 2.0], got -3.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be in [0.01, 100.0], got 0.0"),
    ({"logprobs": 21}, "logprobs", "logprobs must be in [0, 20], got 21"),
    ({"logprobs": -1}, "logprobs", "logprobs must be in [0, 20], got -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs",
     "prompt_logprobs: input should be less than or equal to 20, got 21"),
    ({"prompt_logprobs": -1, "echo": True, "logprobs": 2}, "prompt_logprobs",
     "prompt_logprobs: input should be greater than or equal to 0, got -1"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 0, "echo": False}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"max_tokens": -2, "echo": True}, "max_tokens", "max_tokens must be at least 1, got -2"),
    ({"seed": -(2**63) - 1}, "seed", f"seed must be in [-2**63, 2**63), got {-(2**63) - 1}"),
    ({"seed": 2**63}, "seed", f"seed must be in [-2**63, 2**63), got {2**63}"),
    ({"priority": -1}, "priority",
     "priority must be 0 unless the server was started with --priority-scheduling, got -1"),
    ({"n": 0}, "n", "n: input should be greater than or equal to 1, got 0"),
    ({"timeout_ms": 0}, "timeout_ms", "timeout_ms: input should be greater than or equal to 1, got 0"),
    (
        {"timeout_ms": 2**31},
        "timeout_ms",
        f"timeout_ms: input should be less than or equal to {2**31 - 1}, got {2**31}",
    ),
    ({"n": -1}, "n", "n: input should be greater than or equal to 1, got -1"),
    ({"n": 129}, "n", "n times the number of prompts may be at most 128, got 129 times 1"),
    ({"n": 43, "prompt": ["a", "b", "c"]}, "n", "n times the number of prompts may be at most 128, got 43 times 3"),
    ({"n": 2, "best_of": 3}, "best_of", "best_of must be null or equal to n, which is 2, got 3"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "logit_bias: token ids must be in [0, 257), got 257"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias: token ids must be in [0, 257), got -1"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias.5 must be in [-100.0, 100.0], got 101.0"),
    ({"logit_bias": {"five": 1}}, "logit_bias",
     "logit_bias.five: string should match pattern '^(0|-?[1-9][0-9]{0,17})$', got 'five'"),
    ({"logit_bias": {"05": 1}}, "logit_bias",
     "logit_bias.05: string should match pattern '^(0|-?[1-9][0-9]{0,17})$', got '05'"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias",
     "logit_bias may have at most 1024 entries, got 1025"),
    ({"stop_token_ids": [257]}, "stop_token_ids", "stop_token_ids: token ids must be in [0, 257), got 257"),
    ({"stop_token_ids": [0] * 65}, "stop_token_ids", "stop_token_ids may have at most 64 entries, got 65"),
    ({"stop": ["a"] * 10_000}, "stop",
     "stop: list should have at most 128 items, not 10000, got ['a', 'a', 'a', 'a', ...]"),
    ({"stop": ["a" * 32] * 125 + ["b"]}, "stop",
     "stop: texts should have at most 4000 characters together, not 4001, "
     f"got [{', '.join([repr('a' * 32)] * 4)}, ...]"),
    ({"stop": "a" * 1001}, "stop", f"stop: string should have at most 1000 characters, got '{'a' * 27}...{'a' * 28}'"),
    ({"stream_options": {"include_usage": True}}, "stream_options",
     "stream_options may be given only with stream true"),
    ({"user": "u" * 257}, "user", f"user: string should have at most 256 characters, got '{'u' * 27}...{'u' * 28}'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), INVALID_VALUES)
def test_an_invalid_value(bystander: Bystander, fields: dict[str, Any], param: str, message: str) -> None:
    check(bystander, body_of(fields), 400, "invalid_value", param, message)


CONTEXT = "is too long. This model's maximum context length is 256 tokens"
TOO_LONG = [
    ({"prompt": "x" * 256}, "prompt", f"The prompt {CONTEXT}, with a new one; the prompt has 256"),
    ({"prompt": [97] * 300}, "prompt", f"The prompt {CONTEXT}, with a new one; the prompt has 300"),
    ({"prompt": "x" * 10**6}, "prompt",
     f"The prompt {CONTEXT}, which no more than 3328 bytes can fit; the prompt has 1000000"),
    ({"prompt": "x" * 256, "max_tokens": 0, "echo": True}, "prompt",
     f"The prompt {CONTEXT}, with a new one; the prompt has 256"),
    ({"max_tokens": 256}, "max_tokens",
     f"max_tokens or the prompt {CONTEXT}; the prompt has 1 and max_tokens is 256, together 257"),
    ({"max_tokens": 2**40}, "max_tokens",
     f"max_tokens or the prompt {CONTEXT}; the prompt has 1 and max_tokens is {2**40}, together {2**40 + 1}"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), TOO_LONG)
def test_what_exceeds_the_context(bystander: Bystander, fields: dict[str, Any], param: str, message: str) -> None:
    check(bystander, body_of(fields), 400, "context_length_exceeded", param, message)


@pytest.mark.parametrize("name", ["max_tokens", "n", "seed", "logprobs", "priority", "best_of"])
def test_a_number_of_4000_digits_is_refused_shortly(bystander: Bystander, name: str) -> None:
    response = bystander.post(body_of({name: HUGE**10}))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == name
    assert len(error["message"]) <= 400
    assert bystander.goes_on()


def test_the_bystander_would_notice(bystander: Bystander) -> None:
    """A stream of its own ends when its request is aborted: the check above can fail."""
    engine = FakeEngineClient(auto=False, info=replace(INFO))
    with LiveServer(engine).running() as server:
        body = {"prompt": "x", "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as response:
            other = Bystander(server, response.iter_lines())
            assert other.goes_on()
            engine.from_outside(engine.die)
            with pytest.raises((KeyError, StopIteration)):
                other.goes_on()


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def test_masses_of_prompts_are_refused_by_the_first_too_many(
    bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    validate = CompletionRequest.model_validate

    def watch(value: Any) -> CompletionRequest:
        try:
            return validate(value)
        except ValidationError as error:
            seen.append((len(error.errors()[0]["input"]), error.error_count()))
            raise

    monkeypatch.setattr(CompletionRequest, "model_validate", watch)
    message = "prompt: list should have at most 128 items, not 129, got [[], [], [], [], ...]"
    check(bystander, b'{"prompt": [' + b"[]," * 60_000 + b"[]]}", 400, "invalid_value", "prompt", message)
    assert seen == [(129, 1)]


def test_masses_of_unknown_fields_are_refused(bystander: Bystander) -> None:
    content = body_of({f"k{i}": 0 for i in range(60_000)})
    message = "the body may have at most 64 unknown fields"
    check(bystander, content, 400, "unknown_parameter", f"k{MAX_IGNORED}", message)


def test_more_choices_than_the_queue_can_ever_hold_are_no_case_for_trying_again(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(info=replace(INFO, max_num_seqs=2, max_num_queued_reqs=1)))
    response = api.complete(prompt="x", n=4)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "n times the number of prompts may be at most 3, got 4 times 1"
