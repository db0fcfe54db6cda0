"""From the additions to an answer to the blocks of a message, and the events that tell of them in Anthropic's order.

Knows no HTTP. `plan.py` makes whole messages with it, `stream.py` the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from gptserve.server.completions.shapes import Json
from gptserve.server.messages.conversation import UNSIGNED, signature_of
from gptserve.server.text.calls import CallDelta
from gptserve.server.text.output import Delta, EndReason

Kind = Literal["text", "thinking", "tool_use"]
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_STOP_REASONS: dict[EndReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_INVALID = "INVALID_JSON"  # the field in which Anthropic has clients send such a text back


@dataclass(slots=True)
class _Block:
    """A block; `call` has the id and the name of a call, whose text is its input as JSON."""

    kind: Kind
    call: Json | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class MessageOutput:
    """The content of one message while its tokens arrive. The last block is open until another begins, or the end.

    Unless it shows_thinking, a block of thinking has it in the signature alone.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.num_thinking_tokens = 0
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []

    def content(self) -> list[Json]:
        """Return the blocks so far."""
        return list(map(self._to_json, self._blocks))

    def add(self, delta: Delta) -> Iterator[Json]:
        """Add what came next; yield the events. Use up the iterator."""
        # Only the first addition can be to a call that has begun: what a delta adds after a call is no part of it.
        num_open = int(bool(delta.tool_calls) and delta.tool_calls[0].name is None)
        for call in delta.tool_calls[:num_open]:
            yield from self._add_call(call)
        if delta.reasoning:
            self.num_thinking_tokens += len(delta.token_ids or ())
            yield from self._say("thinking", delta.reasoning)
        if delta.text:
            yield from self._say("text", delta.text)
        for call in delta.tool_calls[num_open:]:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            self.stop_reason = _STOP_REASONS[delta.finish_reason]
            if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
                self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
            if not self._blocks:
                yield from self._begin("text")
            yield from self._end()

    def _say(self, kind: Kind, text: str) -> Iterator[Json]:
        if not self._blocks or self._blocks[-1].kind != kind:
            yield from self._begin(kind)
        yield from self._extend(text)

    def _add_call(self, call: CallDelta) -> Iterator[Json]:
        if call.name is not None:
            yield from self._begin("tool_use", {"id": call.id, "name": call.name})
        if call.arguments:
            yield from self._extend(call.arguments)

    def _begin(self, kind: Kind, call: Json | None = None) -> Iterator[Json]:
        if self._blocks:
            yield from self._end()
        self._blocks.append(_Block(kind, call))
        empty: Json = {"type": kind}
        if kind == "tool_use":
            empty |= {**(call or {}), "input": {}}
        else:
            empty |= {kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        yield self._event("start", content_block=empty)

    def _extend(self, text: str) -> Iterator[Json]:
        block = self._blocks[-1]
        block.pieces.append(text)
        if block.kind != "thinking" or self._shows_thinking:
            kind, name = _DELTAS[block.kind]
            yield self._event("delta", delta={"type": kind, name: text})

    def _end(self) -> Iterator[Json]:
        block = self._blocks[-1]
        if block.kind == "thinking":
            yield self._event("delta", delta={"type": "signature_delta", "signature": self._signature(block)})
        yield self._event("stop")

    def _signature(self, block: _Block) -> str:
        return UNSIGNED if self._shows_thinking else signature_of(block.text)

    def _to_json(self, block: _Block) -> Json:
        if block.kind == "tool_use":
            return {"type": block.kind, **(block.call or {}), "input": _input_of(block.text)}
        if block.kind == "thinking":
            thinking = block.text if self._shows_thinking else ""
            return {"type": block.kind, "thinking": thinking, "signature": self._signature(block)}
        return {"type": block.kind, "text": block.text}

    def _event(self, name: str, **fields: object) -> Json:
        """Return an event about the last block."""
        return {"type": f"content_block_{name}", "index": len(self._blocks) - 1, **fields}


def _input_of(arguments: str) -> dict[str, Any]:
    """Return the input of a call; a text that is no JSON object as a field of one."""
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {_INVALID: arguments}
