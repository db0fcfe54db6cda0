"""POST /v1/chat/completions over a FakeEngineClient. What is refused is in test_chat_refused.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from gptserve.server.schemas.completions import ChatCompletion, ChatCompletionChunk, Completion
from gptserve.server.tools.harmony import MARKS
from tests.server.conftest import MODEL, NO_IDS, OF_PROMPT, OPENING, SAID, Api, LiveServer
from tests.server.fake_engine import EOS, INFO, ByteTokenizer, FakeEngineClient, say

TEXT = 'Once, "é✓😀"\u2028\n'
ANSWER = "<|channel|>analysis<|message|>Hm, é.<|end|><|start|>assistant<|channel|>final<|message|>Four ✓"


def parse_events(text: str, model: type[BaseModel] = ChatCompletionChunk) -> list[dict[str, Any]]:
    """Return the data of a plain stream's events; checks the frame and the shape of each, and the end."""
    *events, end = text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    data = []
    for event in events:
        assert event.startswith("data: ")
        data.append(json.loads(event.removeprefix("data: ")))
        model.model_validate(data[-1], strict=True, extra="forbid")
    return data


def harmony_api(make_api: Callable[..., Api], answer: str = ANSWER) -> Api:
    tokenizer = ByteTokenizer(*MARKS)
    reply = say(tokenizer.encode_with_special(answer), then_eos=True)
    engine = FakeEngineClient(reply, info=replace(INFO, vocab_size=EOS + 1 + len(MARKS)))
    return make_api(engine, tokenizer, "{{ messages[0].content }}{# tools #}<|start|>assistant")


def test_an_answer(api: Api) -> None:
    response = api.chat("hi", max_tokens=4, model=MODEL)
    body = response.json()
    ChatCompletion.model_validate(body, strict=True, extra="forbid")
    assert response.headers["content-type"] == "application/json"
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    message = {**SAID, "content": "abca"}
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "fake-1",
        "batch_invariant": True,
        "seed": api.engine.submitted[0].seed,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                **NO_IDS,
            }
        ],
        **OF_PROMPT,
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 4,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_logprobs_have_openais_chat_shape(api: Api) -> None:
    logprobs = api.chat(max_tokens=2, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    top = [{"token": "\x00", "logprob": 0.0, "bytes": [0]}]
    assert logprobs == {
        "content": [
            {"token": "a", "logprob": -97 / 8, "bytes": [97], "top_logprobs": top},
            {"token": "b", "logprob": -98 / 8, "bytes": [98], "top_logprobs": top},
        ],
        "refusal": None,
    }


def test_prompt_logprobs_stand_beside_the_choices_as_in_vllm(api: Api) -> None:
    body = api.chat("a", n=2, max_tokens=1, prompt_logprobs=1).json()
    ChatCompletion.model_validate(body, strict=True, extra="forbid")
    prompt = api.engine.submitted[0].prompt_token_ids
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in others] == [str(token_id) for token_id in prompt[1:]]
    assert others[-1] == {
        str(ord(">")): {"logprob": -ord(">") / 8, "rank": ord(">") + 1, "decoded_token": ">"},
        "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"},
    }
    assert all("prompt_logprobs" not in choice for choice in body["choices"])
    assert api.chat("a").json()["prompt_logprobs"] is None


def test_a_stream_opens_with_the_role_and_ends_with_the_reason(api: Api) -> None:
    response = api.chat(stream=True, max_tokens=2)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = parse_events(response.text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        OPENING,
        {"content": "a"},
        {"content": "b"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


def test_the_end_of_text_closes_a_stream_without_text(make_api: Callable[..., Api]) -> None:
    chunks = parse_events(make_api(FakeEngineClient(say("a", then_eos=True))).chat(stream=True).text)
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_last_chunk_has_the_usage_where_asked_for(api: Api) -> None:
    chunks = parse_events(api.chat(stream=True, max_tokens=2, n=2, stream_options={"include_usage": True}).text)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("n", [1, 2])
def test_usage_so_far_rises_from_the_first_text(api: Api, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = parse_events(api.chat("hi", stream=True, max_tokens=2, n=n, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0] * n + list(range(1, 2 * n + 1)) + [2 * n]
    assert {chunk["usage"]["total_tokens"] - chunk["usage"]["completion_tokens"] for chunk in chunks} == {10}


def test_a_stream_stops_before_a_stop_string_and_computes_no_more(make_api: Callable[..., Api]) -> None:
    api = make_api(FakeEngineClient(say("one END two")))
    chunks = parse_events(api.chat(stream=True, stop="END").text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one "
    assert chunks[-1]["choices"][0]["stop_reason"] == "END"
    assert api.engine.num_outputs == 7


STREAMED = [
    {},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "n": 2, "stop": ["✓", "o"]},
    {"max_tokens": 9},
    {"stop_token_ids": [0xC3]},
]


@pytest.mark.some(3)
@pytest.mark.parametrize("body", STREAMED)
@pytest.mark.parametrize("has_channels", [False, True])
def test_a_stream_adds_up_to_the_whole(make_api: Callable[..., Api], body: dict[str, Any], has_channels: bool) -> None:
    api = harmony_api(make_api) if has_channels else make_api(FakeEngineClient(say(TEXT, then_eos=True)))
    whole = api.chat(seed=1, **body).json()
    chunks = parse_events(api.chat(seed=1, **body, stream=True, stream_options={"include_usage": True}).text)
    assert chunks[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert [name for part in parts for name in part["delta"] if name == "role"] == ["role"]
        for name in ("content", "reasoning_content"):
            text = "".join(part["delta"].get(name, "") for part in parts)
            assert text == (expected["message"][name] or "")
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["stop_reason"] == expected["stop_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
        scores = [score for part in parts for score in (part["logprobs"] or {"content": []})["content"]]
        assert scores == (expected["logprobs"] or {"content": []})["content"]


def collect_fields(value: object, seen: dict[type[BaseModel], set[str]]) -> None:
    """Add the fields that are given of each model within `value`."""
    if isinstance(value, BaseModel):
        seen.setdefault(type(value), set()).update(value.model_fields_set)
        value = [getattr(value, name) for name in value.model_fields_set]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        collect_fields(part, seen)


def test_answers_have_all_that_the_models_of_the_document_describe_and_no_more(make_api: Callable[..., Api]) -> None:
    api = harmony_api(make_api, f"{ANSWER}<|start|>assistant to=functions.f<|channel|>commentary<|message|>{{}}")
    asked = {"prompt_logprobs": 1, "return_token_ids": True}
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {**asked, "logprobs": True, "top_logprobs": 1, "tools": tools}
    text = {**asked, "prompt": "ab", "logprobs": 1}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    answers: list[tuple[type[BaseModel], Any]] = [
        (ChatCompletion, api.chat(**chat).json()),
        *((ChatCompletionChunk, chunk) for chunk in parse_events(api.chat(**chat, **streamed).text)),
        (Completion, api.complete(**text).json()),
        *((Completion, chunk) for chunk in parse_events(api.complete(**text, **streamed).text, Completion)),
    ]
    seen: dict[type[BaseModel], set[str]] = {}
    for model, answer in answers:
        collect_fields(model.model_validate(answer, strict=True, extra="forbid"), seen)
    assert seen == {model: set(model.model_fields) for model in seen}
    assert len(seen) == 18


def test_reasoning_comes_apart_from_the_content(make_api: Callable[..., Api]) -> None:
    api = harmony_api(make_api)
    body = api.chat("2+2?").json()
    thought = dict.fromkeys(("reasoning", "reasoning_content"), "Hm, é.")
    message = {**SAID, "content": "Four ✓", **thought}
    assert body["choices"][0]["message"] == message
    num_tokens = len(ByteTokenizer(*MARKS).encode_with_special(ANSWER)) + 1
    assert body["usage"]["completion_tokens"] == num_tokens, "reasoning and frames count"
    deltas = [chunk["choices"][0]["delta"] for chunk in parse_events(api.chat("2+2?", stream=True).text)]
    assert deltas[1:7] == [{"reasoning": char, "reasoning_content": char} for char in "Hm, é."]
    assert deltas[7:] == [*({"content": char} for char in "Four ✓"), {}]


def test_reasoning_that_fills_the_limit_leaves_no_content(make_api: Callable[..., Api]) -> None:
    choice = harmony_api(make_api).chat(max_tokens=12).json()["choices"][0]
    assert choice["message"] == {**SAID, "content": "", "reasoning": "Hm", "reasoning_content": "Hm"}
    assert choice["finish_reason"] == "length"


def test_an_answer_counts_as_a_completion(api: Api) -> None:
    api.chat(max_tokens=2, n=2)
    metrics = api.get("/metrics").text
    assert 'gptserve_request_success_total{finished_reason="length",model_name="test-model"} 2.0' in metrics
    assert 'gptserve_time_to_first_token_seconds_count{model_name="test-model"} 1.0' in metrics


def test_a_client_that_goes_away_is_aborted(serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngineClient(auto=False)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
    url = serve(engine).url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=20) as response:
        lines = response.iter_lines()
        engine.from_outside(engine.step)
        assert next(lines).startswith("data: {")
        assert engine.aborted == []
    engine.wait_for(lambda: len(engine.aborted) == 2)
    assert engine.live_ids == []


def test_a_chat_needs_the_key(make_api: Callable[..., Api]) -> None:
    assert make_api(FakeEngineClient(), api_keys=("k",)).chat().status_code == 401
