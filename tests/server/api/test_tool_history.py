"""Whatever the server has answered can be sent back: calls of each format, whole or cut, to strict templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.api.test_chat import parse_events
from tests.server.api.test_responses import post
from tests.server.api.test_tools import ANSWERS, TOOLS, USER, engine_of, tokenizer_of
from tests.server.conftest import Api, LiveServer

MakeApi = Callable[..., Api]
Json = dict[str, Any]
EACH = "{% for m in messages %}{% if m.role == 'assistant' %}BODY{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
EACH += "{% endfor %}{{ tools }}"
ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and "
    "m.tool_calls is undefined) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
SHORT_IDS = "{% if c.id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}"
NOTHING = (
    "{% if not m.content and not m.tool_calls %}"
    "{{ raise_exception('Assistant message must have content or a list of tool calls') }}{% endif %}"
)
STRICT = {
    "hermes": "{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}",
    "llama": "{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ '\"parameters\": ' }}{# dictionary #}{% for name, value in m.tool_calls[0].function.arguments | items %}"
    "{{ name ~ value }}{% endfor %}{% else %}{{ m.content | trim }}{% endif %}",
    "mistral": "{% if m.tool_calls is defined %}[TOOL_CALLS]{% for c in m.tool_calls %}" + SHORT_IDS +
    "{% set out = c.function | tojson %}{{ out[:-1] }}{% endfor %}{% else %}{{ m.content + eos_token }}{% endif %}",
    "mistral-v11": NOTHING + "{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}",
    "harmony": "{% if m.tool_calls %}{% for c in m.tool_calls[:1] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}",
    "thinking": NOTHING +
    "{{ m.reasoning_content }}</think>{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v | string }}{% endfor %}{% endfor %}",
}  # fmt: skip
TEMPLATES = {kind: EACH.replace("BODY", body) for kind, body in STRICT.items()}
for alternating in ("mistral", "thinking"):
    TEMPLATES[alternating] = ALTERNATES + TEMPLATES[alternating]
TEMPLATES["llama"] += '{# "parameters": dictionary #}'
ODD = {
    "hermes": '<tool_call>{"name": "get_weather", "arguments": "Oslo"}</tool_call><tool_call>{"name": "get_time", '
    '"arguments": {"at": "one\ntwo"}}',
    "llama": '{"name": "get_weather", "parameters": "Oslo"}; {"name": "get_time", "parameters": {"at": "one\ntwo"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": "Oslo"}, {"name": "get_time", "arguments": ""}]',
    "mistral-v11": '[TOOL_CALLS]get_weather[ARGS]{"city": one}[TOOL_CALLS]get_time[ARGS]{"at": "one\ntwo"}',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>[Oslo]<|call|>",
    "thinking": '<think></think><tool_call>{"name": "get_weather", "arguments": "[1, 2]"}</tool_call>',
}
CUTS = [None, *range(1, 200, 9)]


def api_of(make_api: MakeApi, kind: str, answer: str) -> Api:
    return make_api(engine_of(kind, answer), tokenizer_of(kind), TEMPLATES[kind])


def streamed(response: Any) -> Json:
    """Return the message that a client makes of the deltas."""
    message: Json = {"role": "assistant", "content": "", "tool_calls": []}
    for chunk in parse_events(response.text):
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({**call, "function": {**call["function"]}})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "answer", [ANSWERS, pytest.param(ODD, marks=pytest.mark.slow)], ids=["two calls", "odd arguments"]
)
@pytest.mark.parametrize("kind", STRICT)
def test_any_answer_can_be_sent_back(make_api: MakeApi, kind: str, answer: dict[str, str]) -> None:
    api = api_of(make_api, kind, answer[kind])
    seen = set()
    for cut in CUTS:
        stream, limit = bool(cut and cut % 2), {} if cut is None else {"max_tokens": cut}
        asked = api.chat(tools=TOOLS, stream=stream, **limit)
        message = streamed(asked) if stream else asked.json()["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        seen.add(len(calls))
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain"} for call in calls]
        follow = results or [USER]
        again = api.chat(messages=[USER, message, *follow], tools=TOOLS, max_tokens=1)
        assert again.status_code == 200, (message, again.text)
    assert max(seen) > 0


@pytest.mark.some(1)
@pytest.mark.parametrize("answer", [ANSWERS, ODD], ids=["two calls", "odd arguments"])
@pytest.mark.parametrize("kind", ["hermes", "llama", "thinking"])
def test_any_response_can_be_continued(serve: Callable[..., LiveServer], kind: str, answer: dict[str, str]) -> None:
    server = serve(engine_of(kind, answer[kind]), tokenizer=tokenizer_of(kind), template=TEMPLATES[kind])
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    for cut in (None, 3, 12, 22, *range(30, 120, 15)):
        limit = {} if cut is None else {"max_output_tokens": cut}
        made = post(server, tools=tools, **limit).json()
        calls = [item for item in made["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"} for call in calls]
        follow = results or [{"role": "user", "content": "And?"}]
        asked = {"role": "user", "content": "hi"}
        kept = post(server, input=follow, previous_response_id=made["id"], tools=tools, max_output_tokens=1)
        sent = post(server, input=[asked, *made["output"], *follow], tools=tools, max_output_tokens=1)
        assert (kept.status_code, sent.status_code) == (200, 200), (made, kept.text, sent.text)
        assert server.engine.submitted[-2].prompt_token_ids == server.engine.submitted[-1].prompt_token_ids
