"""From a conversation to engine requests: what of it reaches the template, the tokenizer and the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gptserve.server.completions.run import CompletionRun
from gptserve.server.tools.harmony import MARKS
from tests.server.conftest import SAID, Api
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient, say

MakeApi = Callable[..., Api]
SHOWN = "{{ messages | tojson }} {{ add_generation_prompt }} {{ x | tojson }} {{ tools }} {{ documents }}"


def prompt_of(api: Api) -> str:
    """Return the text of the last prompt."""
    return b"".join(map(ByteTokenizer(*MARKS).token_bytes, api.engine.submitted[-1].prompt_token_ids)).decode()


def test_a_conversation_is_rendered_and_its_special_tokens_are_tokens(api: Api) -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]
    body = api.chat(messages=messages, max_tokens=2).json()
    ids = (*"[system]é".encode(), EOS, *b"[user]hi", EOS, *b">")
    assert api.engine.submitted[0].prompt_token_ids == ids
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_what_a_client_says_is_no_template(api: Api) -> None:
    api.chat("{{ 7 * 7 }}{% raise %}", max_tokens=1)
    assert prompt_of(api) == "[user]{{ 7 * 7 }}{% raise %}<|endoftext|>>"


def test_the_template_sees_what_was_given_and_nothing_else(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), template=SHOWN)
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
        {"role": "tool", "content": "4", "tool_call_id": "t", "name": "add"},
    ]
    api.chat(messages=messages, max_tokens=1, chat_template_kwargs={"x": [1, {"y": None}]})
    shown = (
        '[{"role": "system", "content": "a\\nb"}, '
        '{"thinking": "Hm", "role": "assistant", "content": "", "reasoning_content": "Hm"}, '
        '{"role": "tool", "content": "4", "name": "add", "tool_call_id": "t"}]'
    )
    assert prompt_of(api) == shown + ' True [1, {"y": null}] None None'


READS_PARTS = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}"
    "{{ m['role'] }}: {{ c['text'] }};{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}]])
def test_a_template_that_reads_parts_loses_no_text(make_api: MakeApi, content: object) -> None:
    api = make_api(FakeEngineClient(), template=READS_PARTS)
    messages = [{"role": "developer", "content": content}, {"role": "user", "content": content}]
    assert api.chat(messages=messages, max_tokens=1).status_code == 200
    assert prompt_of(api) == "system: hi;user: hi;"
    items = [{"role": "developer", "content": "hi"}, {"role": "user", "content": "hi"}]
    asked = {"input": items, "instructions": "Be brief", "store": False, "max_output_tokens": 1}
    assert api.request("POST", "/v1/responses", json=asked).status_code == 200
    assert prompt_of(api) == "system: Be brief;system: hi;user: hi;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "[user]hi<|endoftext|>>"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "[user]hi<|endoftext|>>"),
        ({"add_generation_prompt": False}, "[user]hi<|endoftext|>"),
        ({"continue_final_message": True}, "[user]hi"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[user]hi"),
    ],
)
def test_a_prompt_ends_as_it_was_asked_to(api: Api, body: dict[str, bool], expected: str) -> None:
    api.chat(max_tokens=1, **body)
    assert prompt_of(api) == expected


def test_an_answer_may_take_what_the_context_leaves(api: Api) -> None:
    usage = api.chat().json()["usage"]
    assert usage["total_tokens"] == INFO.max_model_len
    assert api.engine.submitted[0].params.max_tokens == INFO.max_model_len - len(b"[user]hi>") - 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_are_known(api: Api, name: str) -> None:
    assert api.chat(**{name: 3}).json()["usage"]["completion_tokens"] == 3
    assert api.chat(max_tokens=3, max_completion_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_logprobs_are_asked_for(api: Api, body: dict[str, Any], expected: int | None) -> None:
    api.chat(max_tokens=1, **body)
    assert api.engine.submitted[0].params.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "param", "got"),
    [
        ({"n": 2}, "max_completion_tokens", "256, got 2 times 1 times {left}"),
        ({"n": 2, "max_tokens": 129}, "max_tokens", "256, got 2 times 1 times 129"),
        ({"logprobs": True}, "logprobs", "100, got {left} + 0"),
        ({"logprobs": True, "top_logprobs": 1}, "top_logprobs", "100, got {twice} + 0"),
        ({"max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs", "100, got 0 + {prompt}"),
    ],
)
def test_what_a_chat_makes_the_server_hold_is_bounded_with_the_max_tokens_it_gets(
    make_api: MakeApi, fields: dict[str, Any], param: str, got: str
) -> None:
    api = make_api(FakeEngineClient(), max_tokens_held=200, max_logprobs_held=100)
    api.chat()
    [request] = api.engine.submitted
    left = request.params.max_tokens
    error = api.chat(**fields).json()["error"]
    assert left + len(request.prompt_token_ids) == INFO.max_model_len
    assert (error["param"], error["code"]) == (param, "invalid_value")
    values = {"left": left, "twice": 2 * left, "prompt": 21 * len(request.prompt_token_ids)}
    assert error["message"].endswith(" may be at most " + got.format(**values))
    assert len(api.engine.submitted) == 1


def test_the_worst_chat_of_sixty_bytes_is_refused(api: Api) -> None:
    """Its answer took the server 480 MB."""
    assert api.chat(n=128, logprobs=True, top_logprobs=20).json()["error"]["param"] == "top_logprobs"


def test_every_choice_has_its_own_request(make_api: MakeApi) -> None:
    api = make_api(FakeEngineClient(), priority_scheduling=True)
    body = api.chat(n=3, max_tokens=2, seed=7, priority=-2, cache_salt="mine").json()
    requests = api.engine.submitted
    assert [(request.choice_index, request.seed, request.priority, request.cache_salt) for request in requests] == [
        (i, 7, -2, "mine") for i in range(3)
    ]
    assert [request.request_id for request in requests] == [f"{body['id']}-{i}" for i in range(3)]


def test_a_conversation_is_rendered_beside_the_event_loop(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = ByteTokenizer.encode_with_special
    api = make_api(FakeEngineClient())

    def spy(self: ByteTokenizer, text: str, **options: bool) -> list[int]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return encode(self, text, **options)

    monkeypatch.setattr(ByteTokenizer, "encode_with_special", spy)
    assert api.chat(max_tokens=1).status_code == 200
    assert threads == [True]


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_tokenized(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(_self: object, text: str, **_options: bool) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ByteTokenizer, "encode_with_special", encode)
    most = INFO.max_model_len * ByteTokenizer.max_token_bytes
    response = api.chat("x" * most)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "The prompt is too long. This model's maximum context length is 256 tokens, "
        f"which no more than {most} bytes can fit; "
        f"the prompt has {most + 20}",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def harmony_api(make_api: MakeApi, answer: str) -> Api:
    tokenizer = ByteTokenizer(*MARKS)
    engine = FakeEngineClient(
        say(tokenizer.encode_with_special(answer), then_eos=True), info=replace(INFO, vocab_size=EOS + 5)
    )
    return make_api(engine, tokenizer, "{{ messages[0].content }}<|start|>assistant")


def test_each_choice_of_a_harmony_model_is_split_by_itself(make_api: MakeApi) -> None:
    api = harmony_api(make_api, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>4")
    choices = api.chat("2+2?", n=2).json()["choices"]
    message = {**SAID, "content": "4", "reasoning": "Hm", "reasoning_content": "Hm"}
    assert [choice["message"] for choice in choices] == [message, message]


def test_a_completion_of_a_harmony_model_is_not_split(make_api: MakeApi) -> None:
    answer = "<|channel|>final<|message|>4"
    api = harmony_api(make_api, answer)
    for skip, text in ((None, "final4"), (True, "final4"), (False, answer)):
        response = api.complete(prompt="x", max_tokens=99, skip_special_tokens=skip)
        assert response.json()["choices"][0]["text"] == text


def test_the_messages_are_not_held_while_the_answer_is_computed(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[object] = []

    def note(*arguments: Any, **fields: Any) -> CompletionRun:
        held.append(arguments[0].body.messages)
        return CompletionRun(*arguments, **fields)

    monkeypatch.setattr("gptserve.server.completions.answer.CompletionRun", note)
    assert make_api(FakeEngineClient()).chat("hi", max_tokens=1).status_code == 200
    assert held == [[]]
