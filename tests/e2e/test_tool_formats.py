"""Every format of calls through the real application and engine, its marks special tokens or texts.

The model has random weights. Each body is answered with drafts and a prefix cache, and without both: the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.process.loop import Report, StepEngine
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.engine.scheduling.drafter import Drafter
from gptserve.server.tools.harmony import MARKS
from gptserve.weights.chat.template import ChatTemplate
from gptserve.weights.tokenizers.tokenizer import Tokenizer
from tests.conftest import MakeGPT2
from tests.e2e.marked_models import Marks, marked_model
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.runs import make_config
from tests.server.api.test_chat import parse_events
from tests.server.app_options import make_app

HARMONY = (*MARKS, "<|constrain|>", "<|call|>", "<|return|>")
OTHERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
SHOWN = "{{ messages[-1].content }}{# tools #}"
TEMPLATES = {
    "hermes": SHOWN + "{# <tool_call> #}",
    "hermes, thinking": SHOWN + "{# <tool_call> </think> #}<think>",
    "llama": SHOWN + '{# "parameters": dictionary #}',
    "mistral": SHOWN + "{# [TOOL_CALLS] #}",
    "mistral-v11": SHOWN + "{# [TOOL_CALLS] [ARGS] #}",
    "harmony": SHOWN + "<|start|>assistant",
}
CASES = [
    *((name, (OTHERS, is_special)) for is_special in (True, False) for name in TEMPLATES if name != "harmony"),
    ("harmony", (HARMONY, True)),
]
FIRST = [("hermes, thinking", (OTHERS, True)), ("llama", (OTHERS, False)), ("mistral-v11", (OTHERS, True)), CASES[-1]]
"""Of each way to write calls one, and marks of both kinds."""
STORY = "The cat sat on the mat, and they'll say it's 1000 years old. " * 2  # several blocks
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Århus"]}, "day": {"type": "integer", "minimum": 1, "maximum": 31}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": PLACE, "get_time": NONE}
FUNCTIONS = [{"name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()]


def chat(**fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    asked = {"messages": [{"role": "user", "content": STORY}], "tools": tools, "max_tokens": 160, "seed": 5, **fields}
    return asked if not asked.get("stream") else {**asked, "stream_options": {"include_usage": True}}


def response(**fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    return {"input": STORY, "tools": tools, "max_output_tokens": 160, "store": False, "seed": 7, **fields}


FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
TEXT = {"format": {"type": "json_schema", "name": "place", "schema": PLACE}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BODIES: dict[str, dict[str, Any]] = {
    "required": chat(tool_choice="required"),
    "named, streamed": chat(tool_choice=NAMED, stream=True),
    "single": chat(tool_choice="required", parallel_tool_calls=False, n=2),
    "single if any, streamed": chat(parallel_tool_calls=False, stream=True),
    "json": chat(response_format=FORMAT, tools=None),
    "json or calls, streamed": chat(response_format=FORMAT, stream=True),
    "response: required, streamed": response(tool_choice="required", stream=True),
    "response: named": response(tool_choice={"type": "function", "name": "get_weather"}),
    "response: json": response(text=TEXT, tools=[]),
}


@pytest.fixture(scope="module")
def folders(make_gpt2: MakeGPT2, tmp_path_factory: pytest.TempPathFactory) -> dict[Marks, Path]:
    """Models whose vocabularies have some marks."""
    return {
        (marks, is_special): marked_model(make_gpt2, tmp_path_factory.mktemp("model"), marks, is_special)
        for marks, is_special in {marks for _, marks in CASES}
    }


def load(config: EngineConfig, *, report: Report) -> StepEngine:
    return Engine(config, drafter=None if config.speculative_ngram else Drafter())


def answers(folder: Path, template: str, bodies: list[dict[str, Any]], **options: Any) -> list[httpx.Response]:
    tokenizer = Tokenizer.open(folder)

    async def converse() -> list[httpx.Response]:
        async with started(ThreadClient(partial(load, make_config(folder, **options)))) as engine:
            chat_template = ChatTemplate(template, {})
            app = make_app(engine, tokenizer, "model", chat_template=chat_template)
            with closing(chat_template):
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                    return [await client.post(_path(body), json=body) for body in bodies]

    return asyncio.run(asyncio.wait_for(converse(), LIMIT_S))


def _path(body: dict[str, Any]) -> str:
    return "/v1/responses" if "input" in body else "/v1/chat/completions"


def read(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return what each choice of an answer has: text, calls, why it ended."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        body = answer.json()
        return read_response(body) if body["object"] == "response" else [read_choice(c) for c in body["choices"]]
    if answer.text.startswith("event:"):
        return read_response(json.loads(answer.text.rpartition("data: ")[2])["response"])
    events = parse_events(answer.text)
    read: dict[str, Any] = {"text": "", "calls": [], "reason": None}
    for [choice] in filter(None, (event["choices"] for event in events)):
        read["text"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            read["calls"] += [[call["function"]["name"], ""]] if "id" in call else []
            read["calls"][-1][1] += call["function"]["arguments"]
        read["reason"] = choice["finish_reason"]
    return [{**read, "calls": [tuple(call) for call in read["calls"]]}]


def read_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return {"text": message["content"] or "", "calls": calls, "reason": choice["finish_reason"]}


def read_response(body: dict[str, Any]) -> list[dict[str, Any]]:
    assert body["status"] in ("completed", "incomplete"), body
    items = body["output"]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return [{"text": text, "calls": calls, "reason": "length" if body["status"] == "incomplete" else "stop"}]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "marks"),
    [pytest.param(*case, marks=() if case in FIRST else pytest.mark.slow) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_every_format_gives_what_is_asked_for(folders: dict[Marks, Path], kind: str, marks: Marks) -> None:
    folder = folders[marks]
    ends = Tokenizer.open(folder).encode_with_special("<|end|></think>")
    hurry = {"logit_bias": {str(token_id): 4 for token_id in ends}}  # reasoning at random would go on to the limit
    bodies = [{**body, **({} if name.startswith("response") else hurry)} for name, body in BODIES.items()]
    drafted = answers(folder, TEMPLATES[kind], bodies, speculative_ngram=2)
    plain = answers(folder, TEMPLATES[kind], bodies, enable_prefix_caching=False)
    ended = 0
    for name, one, other in zip(BODIES, map(read, drafted), map(read, plain), strict=True):
        assert one == other, name
        whole = [choice for choice in one if choice["reason"] != "length"]
        for choice in whole:
            check(name, choice)
        ended += len(whole)
    assert ended >= 3
    assert min(map(num_cached, drafted[1:])) > 0, "all have one prompt"
    assert max(map(num_cached, plain)) == 0


def check(name: str, choice: dict[str, Any]) -> None:
    """Assert that an answer that has come to its end is what its body asks for."""
    for function, arguments in choice["calls"]:
        jsonschema.validate(json.loads(arguments), SCHEMAS[function])
    if "json" in name and not choice["calls"]:
        jsonschema.validate(json.loads(choice["text"]), PLACE)
    if "named" in name or "single" in name:
        assert len(choice["calls"]) == 1
    if "required" in name or "named" in name:
        assert len(choice["calls"]) >= 1


def num_cached(answer: httpx.Response) -> int:
    return max(map(int, re.findall(r'"cached_tokens":(\d+)', answer.text)))
