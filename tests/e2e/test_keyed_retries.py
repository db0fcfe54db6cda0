"""A keyed request at a server that never saw it: key and body alone say what the answer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.e2e.application import MODEL, ask

Json = dict[str, Any]
TEMPLATE = "{{ messages[0].content }}{# tools <tool_call> #}"
PLACE: Json = {
    **{"type": "object", "required": ["city"], "additionalProperties": False},
    "properties": {"city": {"type": "string", "maxLength": 8}},
}
NAMES = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3, "maxItems": 3}
MESSAGES = [{"role": "user", "content": "Once"}]
COMMON = {"model": MODEL, "temperature": 1.5}
STREAMED: dict[str, Json] = {
    "n": {"prompt": "Once", "n": 3, "logprobs": 2, "frequency_penalty": 0.7, "max_tokens": 24, "ignore_eos": True},
    "grammar": {
        "messages": MESSAGES,
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": NAMES}},
    },
    "tools": {
        "messages": MESSAGES,
        "max_tokens": 60,
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}],
        "tool_choice": "required",
    },
}
RESPONSES: dict[str, Json] = {
    "text": {"input": "Once", "max_output_tokens": 24},
    "function": {
        "input": "Once",
        "max_output_tokens": 60,
        "tools": [{"type": "function", "name": "get_weather", "parameters": PLACE}],
        "tool_choice": "required",
    },
}
BODIES = [COMMON | body for body in (*STREAMED.values(), *RESPONSES.values())]


def asked(folder: Path, bodies: list[Json], key: str, after: dict[int, str] | None = None) -> list[httpx.Response]:
    """Return the answers of a new server to these bodies, each with a key of its own, some from an event on."""
    headers = [{"idempotency-key": f"{key}-{index}"} for index in range(len(bodies))]
    for index, event_id in (after or {}).items():
        headers[index]["last-event-id"] = event_id
    answers = ask(folder, Tokenizer.of_model(folder), bodies, template=TEMPLATE, headers=headers)
    assert [answer.status_code for answer in answers] == [200] * len(bodies), [answer.text for answer in answers]
    return answers


def said(answer: Json) -> Any:
    """Return what an answer says, without the ids that each server makes."""
    if "output" in answer:
        parts = [item.get("arguments", item.get("content")) for item in answer["output"]]
        return answer["seed"], answer["status"], parts, answer["usage"]["output_tokens"]
    choices = [choice | {"message": _of_message(choice)} for choice in answer["choices"]]
    return answer["seed"], choices, answer["usage"]["completion_tokens"]


def _of_message(choice: Json) -> Any:
    message = choice.get("message") or {}
    return message.get("content"), [call["function"] for call in message.get("tool_calls") or ()]


@pytest.fixture(scope="module")
def firsts(storyteller: Path) -> list[Any]:
    return [said(answer.json()) for answer in asked(storyteller, BODIES, "key")]


@pytest.mark.slow
def test_a_server_that_never_saw_a_key_gives_the_same_answer(storyteller: Path, firsts: list[Any]) -> None:
    assert [said(answer.json()) for answer in asked(storyteller, BODIES, "key")] == firsts
    others = [said(answer.json()) for answer in asked(storyteller, BODIES, "other")]
    assert all(other != first for other, first in zip(others, firsts, strict=True)), "another key, another answer"


@pytest.mark.slow
def test_a_stream_goes_on_at_a_server_that_never_saw_its_key(storyteller: Path) -> None:
    bodies = [COMMON | body | {"stream": True} for body in STREAMED.values()]
    wholes = [events_of(answer) for answer in asked(storyteller, bodies, "stream")]
    cuts = [next(i for i in range(len(whole) // 2, len(whole)) if whole[i][0]) for whole in wholes]
    after = {index: str(whole[cut][0]) for index, (whole, cut) in enumerate(zip(wholes, cuts, strict=True))}
    rests = [events_of(answer) for answer in asked(storyteller, bodies, "stream", after)]

    for whole, rest, event_id in zip(wholes, rests, after.values(), strict=True):
        has_come = whole[: next(i for i, (id_, _) in enumerate(whole) if id_ == event_id) + 1]
        counts = list(map(int, event_id.split(".")))
        assert 0 < len(rest) < len(whole)
        if len(counts) == 1:
            assert [*has_come, *rest] == whole
        assert {choices for id_, choices in rest if id_} <= {choices for _, choices in whole}


def events_of(answer: httpx.Response) -> list[tuple[str | None, str]]:
    """Return the id and the choices of each event."""
    found: list[tuple[str | None, str]] = []
    blocks = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")
    for block in (block for block in blocks if "data: " in block):
        head, _, data = block.partition("data: ")
        # The name of a call is made anew by each server.
        found.append((head.strip().removeprefix("id: ") or None, data.partition('"choices":')[2].partition("call_")[0]))
    return found
