"""thinking_token_budget with a real engine: where reasoning ends, whatever else is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.conftest import MakeGPT2
from tests.e2e.marked_models import Marks, marked_model
from tests.e2e.test_tool_formats import FORMAT, FUNCTIONS, OTHERS, PLACE, SHOWN, STORY, answers
from tests.server.api.test_chat import parse_events

MARKS: list[Marks] = [(OTHERS, True), (OTHERS, False)]
OPENS, DOES_NOT_OPEN = SHOWN + "{# <tool_call> </think> #}<think>", SHOWN + "{# <tool_call> </think> #}"
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
WANTED: dict[str, dict[str, Any]] = {
    "text": {},
    "text, streamed": {"stream": True},
    "json": {"response_format": FORMAT},
    "calls": {"tools": TOOLS, "tool_choice": "required"},
    "text or calls": {"tools": TOOLS},
}


@pytest.fixture(
    scope="module", params=[MARKS[0], pytest.param(MARKS[1], marks=pytest.mark.slow)], ids=["special", "not special"]
)
def folder(request: pytest.FixtureRequest, make_gpt2: MakeGPT2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marked_model(make_gpt2, tmp_path_factory.mktemp("model"), *request.param)


def body(limit: int | None, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 160, "seed": 5, "return_token_ids": True}
    return {**asked, "thinking_token_budget": limit, **fields}


def read(answer: Any) -> tuple[list[int], str, str]:
    """Return the tokens, the reasoning and the text of an answer."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        [choice] = answer.json()["choices"]
        return choice["token_ids"], choice["message"]["reasoning"] or "", choice["message"]["content"] or ""
    ids, reasoning, text = list[int](), "", ""
    for event in parse_events(answer.text):
        for choice in event["choices"]:
            ids += choice.get("token_ids") or ()
            reasoning += choice["delta"].get("reasoning") or ""
            text += choice["delta"].get("content") or ""
    return ids, reasoning, text


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "wanted", [pytest.param(wanted, marks=pytest.mark.slow if i > 1 else ()) for i, wanted in enumerate(WANTED)]
)
def test_reasoning_ends_at_its_limit_and_the_answer_follows(folder: Path, wanted: str) -> None:
    tokenizer = Tokenizer.open(folder)
    [end] = tokenizer.encode_with_special("</think>")
    limits = (None, 0, 1, 9, -1)
    bodies = [body(limit, logit_bias={str(end): -100}, **WANTED[wanted]) for limit in limits]
    drafted = answers(folder, OPENS, bodies, speculative_ngram=2)
    plain = answers(folder, OPENS, bodies, enable_prefix_caching=False, max_num_batched_tokens=64)
    found = list(map(read, drafted))
    assert found == list(map(read, plain))
    free, *limited, unlimited = found
    assert unlimited == free
    assert end not in free[0]
    for limit, (ids, _, text) in zip(limits[1:-1], limited, strict=True):
        assert ids.index(end) == limit
        assert "</think>" not in text
    if wanted == "json":
        jsonschema.validate(json.loads(limited[0][2]), PLACE)


def test_reasoning_that_the_model_begins_is_limited_too(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    begin, end = (tokenizer.encode_with_special(mark)[0] for mark in ("<think>", "</think>"))
    eager = {"logit_bias": {str(begin): 60}}
    [answer] = answers(folder, DOES_NOT_OPEN, [body(4, **eager)])
    ids, _, _ = read(answer)
    assert ids[0] == begin
    assert ids.index(end) == 5
    [answer] = answers(folder, DOES_NOT_OPEN, [body(4)])
    assert read(answer)[1] == "", "a model that does not reason need not"
