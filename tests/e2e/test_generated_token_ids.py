"""An answer that goes on after the tokens that its client has: what follows is what followed before."""

from __future__ import annotations

import json
from itertools import starmap
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.e2e.application import MODEL, ask

Json = dict[str, Any]
COMMON = {"model": MODEL, "max_tokens": 24, "seed": 5, "temperature": 1.0, "return_token_ids": True}
STORY = {"prompt": "Once upon a time"}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
NAMES = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3, "maxItems": 3}
BODIES: list[Json] = [
    STORY | {"n": 3, "logprobs": 2, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "presence_penalty": -0.4},
    STORY | {"prompt": ["Once", "There was a"], "n": 2, "min_tokens": 3},
    STORY | {"echo": True, "temperature": 2.0},
    CHAT | {"logprobs": True, "top_logprobs": 1, "temperature": 1.5},
    CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": NAMES}}},
]


def post(folder: Path, bodies: list[Json]) -> list[Json]:
    answers = ask(folder, Tokenizer.of_model(folder), [COMMON | body for body in bodies])
    assert [answer.status_code for answer in answers] == [200] * len(bodies), [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def after(body: Json, whole: Json, cut: int) -> Json:
    """Return the body of one who has so many tokens of the first choice, one fewer of the next, and so on."""
    counts = [max(0, cut - choice["index"]) for choice in whole["choices"]]
    given = [choice["token_ids"][:count] for choice, count in zip(whole["choices"], counts, strict=True)]
    return body | {"generated_token_ids": given}


def text_of(choice: Json) -> str:
    if "message" not in choice:
        return str(choice["text"])
    calls = choice["message"].get("tool_calls") or ()
    return (choice["message"]["content"] or "") + "".join(call["function"]["arguments"] for call in calls)


def scores_of(choice: Json) -> list[Any]:
    scores = choice["logprobs"] or {}
    return scores["content"] if "content" in scores else list(zip(*scores.values(), strict=True))


@pytest.fixture(scope="module")
def wholes(storyteller: Path) -> list[Json]:
    return post(storyteller, BODIES)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 7, 60])
def test_what_follows_is_the_rest_of_the_answer(storyteller: Path, wholes: list[Json], cut: int) -> None:
    rests = post(
        storyteller, list(starmap(lambda body, whole: after(body, whole, cut), zip(BODIES, wholes, strict=True)))
    )
    for whole, rest in zip(wholes, rests, strict=True):
        for had, follows in zip(whole["choices"], rest["choices"], strict=True):
            num_given = min(len(had["token_ids"]), max(0, cut - had["index"]))
            assert follows["token_ids"] == had["token_ids"][num_given:]
            assert text_of(had).endswith(text_of(follows))
            assert scores_of(follows) == (scores_of(had)[num_given:])
            assert [follows[name] for name in ("finish_reason", "stop_reason")] == [
                had[name] for name in ("finish_reason", "stop_reason")
            ]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [rest["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


@pytest.mark.slow
def test_a_stop_string_may_begin_before_and_end_after_the_cut(storyteller: Path) -> None:
    (whole,) = post(storyteller, [STORY | {"temperature": 0}])
    token_ids = whole["choices"][0]["token_ids"]
    texts = [
        rest["choices"][0]["text"]
        for rest in post(
            storyteller,
            [STORY | {"temperature": 0, "generated_token_ids": [token_ids[:cut]]} for cut in range(len(token_ids) + 1)],
        )
    ]
    begins = len(whole["choices"][0]["text"]) - len(texts[8])
    stop = whole["choices"][0]["text"][begins - 2 : begins + 4]
    (stopped,) = post(storyteller, [STORY | {"temperature": 0, "stop": stop}])
    num_tokens = len(stopped["choices"][0]["token_ids"])
    bodies = [
        STORY | {"temperature": 0, "stop": stop, "stream": True, "generated_token_ids": [token_ids[:cut]]}
        for cut in range(num_tokens + 1)
    ]
    told = [
        events(answer) for answer in ask(storyteller, Tokenizer.of_model(storyteller), [COMMON | b for b in bodies])
    ]
    rests = ["".join(event["choices"][0]["text"] for event in of_one) for of_one in told]
    assert rests[0] == stopped["choices"][0]["text"]
    assert all(rests[0].endswith(rest) for rest in rests)
    assert len(set(rests)) > 3
    assert [of_one[-1]["choices"][0]["stop_reason"] for of_one in told[:-1]] == [stop] * num_tokens
    assert told[-1] == []  # the client has the end, too


TOOLS = "{{ messages[0].content }}{# tools <tool_call> #}"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
CALL = CHAT | {
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}],
    "tool_choice": "required",
    "max_tokens": 60,
    "ignore_eos": False,
}


@pytest.mark.parametrize("is_keyed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_call_goes_on_whether_it_is_stored_or_not(storyteller: Path, is_keyed: bool) -> None:
    tokenizer, body = Tokenizer.of_model(storyteller), COMMON | CALL
    [whole] = ask(storyteller, tokenizer, [body], template=TOOLS)
    [choice] = whole.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    token_ids = choice["token_ids"]
    bodies = [body | {"generated_token_ids": [token_ids[:cut]]} for cut in range(0, len(token_ids), 5)]
    headers = [{"idempotency-key": str(index)} for index in range(len(bodies))] if is_keyed else ()
    rests = [
        answer.json()["choices"][0] for answer in ask(storyteller, tokenizer, bodies, template=TOOLS, headers=headers)
    ]

    assert [rest["token_ids"] for rest in rests] == [token_ids[cut:] for cut in range(0, len(token_ids), 5)]
    assert {rest["finish_reason"] for rest in rests} == {choice["finish_reason"]}
    said = ["".join(c["function"]["arguments"] for c in rest["message"].get("tool_calls") or ()) for rest in rests]
    assert said[0] == call["function"]["arguments"]
    assert all(said[0].endswith(rest) for rest in said)
    assert len({*said}) > 2


def test_the_events_of_a_stored_completion_count_the_tokens_that_were_given(storyteller: Path) -> None:
    tokenizer, body = Tokenizer.of_model(storyteller), COMMON | STORY | {"ignore_eos": True}
    [whole] = ask(storyteller, tokenizer, [body])
    token_ids = whole.json()["choices"][0]["token_ids"]
    given = body | {"generated_token_ids": [token_ids[:7]], "stream": True}
    headers = [{"idempotency-key": "a"}, {"idempotency-key": "a", "last-event-id": "12"}]
    first, resumed = ask(storyteller, tokenizer, [given, given], headers=headers)
    ids = [int(line.removeprefix("id: ")) for line in first.text.splitlines() if line.startswith("id: ")]

    assert ids == sorted({*ids}), "each says how many tokens its reader has"
    assert (ids[0] > 7, ids[-1]) == (True, 24)
    assert first.text.endswith(resumed.text), "it goes on after an event of its own"
    assert resumed.text.startswith(f"id: {next(i for i in ids if i > 12)}\n")


def events(answer: httpx.Response) -> list[Json]:
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.slow
def test_a_chat_is_not_opened_again(storyteller: Path) -> None:
    body = COMMON | CHAT | {"temperature": 0, "ignore_eos": True, "stream": True}
    tokenizer = Tokenizer.of_model(storyteller)
    whole = events(ask(storyteller, tokenizer, [body])[0])
    given = [t for event in whole for t in event["choices"][0].get("token_ids") or ()][:5]
    rest = events(ask(storyteller, tokenizer, [body | {"generated_token_ids": [given]}])[0])
    assert [event["choices"] for event in rest] == [event["choices"] for event in whole[-len(rest) :]]
    assert "role" in whole[0]["choices"][0]["delta"]
    assert "role" not in rest[0]["choices"][0]["delta"]


REFUSED: list[tuple[Json, str]] = [
    ({"seed": None}, "generated_token_ids may be given only with the seed of the answer that had the tokens, got none"),
    ({"n": 2}, "generated_token_ids must hold 2 lists, one for each choice, got 1"),
    ({"max_tokens": 1}, "generated_token_ids[0] may hold at most max_tokens, which is 1, got 2"),
    ({"generated_token_ids": [[-1]]}, "generated_token_ids[0]: token ids must be in [0, 2030), got -1"),
    ({"generated_token_ids": [[2030]]}, "generated_token_ids[0]: token ids must be in [0, 2030), got 2030"),
    (
        {"prompt_logprobs": 1},
        "generated_token_ids may not be given with prompt_logprobs, as the prompt is not scored again",
    ),
    (
        {"echo": True, "logprobs": 1},
        "generated_token_ids may not be given with echo and logprobs, as the prompt is not scored again",
    ),
    (
        {"stop_token_ids": [70]},
        "generated_token_ids[0] must not go on after the choice ends, with token 1, got 2",
    ),
]


def test_what_cannot_go_on_exactly_is_refused(storyteller: Path) -> None:
    base = COMMON | STORY | {"generated_token_ids": [[70, 71]]}
    grammar = {"structured_outputs": {"regex": "[0-9]{4}"}}
    answers = ask(
        storyteller, Tokenizer.of_model(storyteller), [base | change for change in (*(c for c, _ in REFUSED), grammar)]
    )
    for (_, message), answer in zip(REFUSED, answers, strict=False):
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["param"]) == (400, message, "generated_token_ids")
    assert answers[-1].status_code == 500, "the grammar does not allow these tokens: the request fails, and it alone"
