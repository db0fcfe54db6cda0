"""Tools of a real model, which speaks nonsense: calls that it must make are what their schemas ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.e2e.application import ask
from tests.server.api.test_chat import parse_events

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}]
BODY: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "Once"}], "tools": TOOLS, "tool_choice": "required"},
    **{"parallel_tool_calls": False, "temperature": 1.5, "seed": 1, "max_tokens": 150, "n": 4},
}


@pytest.mark.some(1)
@pytest.mark.parametrize("sign", ["<tool_call>", '"parameters": dictionary'])
def test_calls_that_a_model_must_make_match_their_schema_streamed_or_not(storyteller: Path, sign: str) -> None:
    template = "{{ messages[0].content }}{# tools " + sign + " #}"
    bodies = [BODY, {**BODY, "stream": True}, {**BODY, "tool_choice": "auto", "seed": 2}]
    whole, stream, free = ask(storyteller, Tokenizer.open(storyteller), bodies, template=template)
    joined = [""] * 4
    for chunk in parse_events(stream.text):
        [choice] = chunk["choices"]
        for call in choice["delta"].get("tool_calls", ()):
            joined[choice["index"]] += call["function"]["arguments"]
    finished = 0
    for choice in whole.json()["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == joined[choice["index"]]
        if choice["finish_reason"] == "tool_calls":
            finished += 1
            jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)
    assert finished >= 3
    assert all(choice["message"]["content"] for choice in free.json()["choices"]), "it may speak"
