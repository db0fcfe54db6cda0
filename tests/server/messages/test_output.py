from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gptserve.server.messages.conversation import UNSIGNED, signature_of
from gptserve.server.messages.output import MessageOutput
from gptserve.server.text.calls import CallDelta
from gptserve.server.text.output import Delta, join_deltas
from tests.server.api.test_messages import joined

TEXTS = st.sampled_from(["", "a", "é\n", "\u2028", '{"'])
STEPS = st.lists(st.tuples(st.sampled_from(["text", "reasoning", "call", "arguments", "both"]), TEXTS), max_size=12)


def deltas_of(steps: list[tuple[str, str]]) -> list[Delta]:
    """Return deltas as a reader of answers makes them: arguments belong to the call that was begun last."""
    deltas: list[Delta] = []
    num_calls, is_called = 0, False
    for kind, text in steps:
        if kind == "call":
            deltas.append(Delta("", tool_calls=(CallDelta(num_calls, "", f"id{num_calls}", "f"),)))
            num_calls, is_called = num_calls + 1, True
        elif kind == "arguments" and is_called:
            deltas.append(Delta("", tool_calls=(CallDelta(num_calls - 1, text),)))
        elif kind == "both":
            deltas.append(Delta(text, reasoning="r", token_ids=(1,)))
            is_called = False
        elif kind in ("text", "reasoning"):
            deltas.append(Delta(text) if kind == "text" else Delta("", reasoning=text))
            is_called = is_called and not text
    return [*deltas, Delta("", finish_reason="stop")]


def raw(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**block, "input": "…"} if block["type"] == "tool_use" else block for block in content]


@given(STEPS, st.booleans())
def test_the_events_of_any_deltas_make_the_content(steps: list[tuple[str, str]], shows_thinking: bool) -> None:
    output = MessageOutput(shows_thinking=shows_thinking)
    deltas = deltas_of(steps)
    events: list[dict[str, Any]] = [event for delta in deltas for event in output.add(delta)]
    pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    for event in events:  # what a model writes need not be JSON
        if event.get("delta", {}).get("type") == "input_json_delta":
            event["delta"] = {**event["delta"], "partial_json": ""}
    start = {
        "type": "message_start",
        "message": {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {}},
    }
    ended = {"stop_reason": output.stop_reason, "stop_sequence": output.stop_sequence}
    told = {"type": "message_delta", "delta": ended, "usage": {}}
    message = joined([start, *events, told, {"type": "message_stop"}])

    content = output.content()
    assert raw(message["content"]) == raw(content)
    whole = join_deltas(deltas)
    assert "".join(block["text"] for block in content if block["type"] == "text") == whole.text
    assert "".join(pieces) == "".join(call.arguments for call in whole.tool_calls)
    thoughts = [block for block in content if block["type"] == "thinking"]
    if shows_thinking:
        assert "".join(block["thinking"] for block in thoughts) == whole.reasoning
        assert {block["signature"] for block in thoughts} <= {UNSIGNED}
    else:
        assert {block["thinking"] for block in thoughts} <= {""}
        assert UNSIGNED not in {block["signature"] for block in thoughts}


def test_a_signature_of_any_thinking_is_told_from_none() -> None:
    assert signature_of("") == ""
    assert signature_of("a") not in ("", UNSIGNED)
