"""From the additions to an answer to the items of a response, and the events that tell of them in OpenAI's order.

The events depend on the additions alone, so every reader of the same tokens gets the same ones. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gptserve.server.completions.shapes import Json, token_with_top
from gptserve.server.responses.custom_input import InputReader
from gptserve.server.responses.tools import ResponseTools
from gptserve.server.text.calls import CallDelta
from gptserve.server.text.output import Delta, EndReason, TokenScore

Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
_OF_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}


@dataclass(slots=True)
class _Item:
    """An item with its only part; `call` has the id and the names of a call, which has none.

    The lists of logprobs in its JSON are iterators, each to be used once.
    """

    item_id: str
    kind: Kind
    call: Json | None = None
    reader: InputReader | None = None
    status: ItemStatus = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def to_json(self, status: ItemStatus, *, is_new: bool = False) -> Json:
        head: Json = {"id": self.item_id, "type": self.kind, "status": status}
        if self.call is not None:
            return {**head, **self.call, _OF_CALLS[self.kind]: self.text}
        own: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**head, **own, "content": [] if is_new else [self.part()]}

    def part(self) -> Json:
        own: Json = {"annotations": []} if self.kind == "message" else {}
        return {"type": _TEXTS[self.kind], "text": self.text, **own, **self.scored(self.logprobs)}

    def scored(self, logprobs: list[Json]) -> Json:
        """Return the field with logprobs, which only a message has."""
        return {"logprobs": iter(logprobs)} if self.kind == "message" else {}


class ResponseOutput:
    """The output of one response while its tokens arrive: reasoning, messages and calls, one after another.

    With `marks_reasoning` only tokens of a message have logprobs. The last item is open until another begins, or the
    end.
    """

    def __init__(self, response_id: str, tools: ResponseTools, *, marks_reasoning: bool) -> None:
        self.finish_reason: EndReason | None = None
        self.num_reasoning_tokens = 0
        self._suffix = response_id.partition("_")[2]
        self._tools = tools
        self._marks_reasoning = marks_reasoning
        self._items: list[_Item] = []

    @property
    def num_entries(self) -> int:
        """The number of logprobs that the end of the last item has."""
        return len(self._items[-1].logprobs) if self._items else 0

    def items(self, status: ItemStatus) -> list[Json]:
        """Return the items so far; `status` is that of the last one if it is open."""
        return [item.to_json(status if item.status == "in_progress" else item.status) for item in self._items]

    def add(self, delta: Delta) -> Iterator[Json]:
        """Add what came next; yield the events, without their numbers. Use up the iterator."""
        # Only the first addition can be to a call that has begun: what a delta adds after a call is no part of it.
        num_open = int(bool(delta.tool_calls) and delta.tool_calls[0].name is None)
        for call in delta.tool_calls[:num_open]:
            yield from self._add_call(call)
        if delta.reasoning:
            self.num_reasoning_tokens += len(delta.token_ids or ())
            yield from self._say("reasoning", delta.reasoning, ())
        is_scored = bool(delta.logprobs) and (self._last_kind == "message" or not self._marks_reasoning)
        if delta.text or is_scored:
            yield from self._say("message", delta.text, delta.logprobs or ())
        for call in delta.tool_calls[num_open:]:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if not self._items:
                yield from self._begin("message")

    def end(self, status: ItemStatus) -> Iterator[Json]:
        """End the last item, if anything came; yield the events."""
        if not self._items:  # the client hung up before
            return
        item = self._items[-1]
        item.status = status
        if item.call is not None:
            named = {"name": item.call["name"]} if item.kind == "function_call" else {}
            field_name = _OF_CALLS[item.kind]
            yield self._event(
                f"{item.kind}_{field_name}.done", item_id=item.item_id, **named, **{field_name: item.text}
            )
        else:
            text = {"text": item.text, **item.scored(item.logprobs)}
            yield self._event(f"{_TEXTS[item.kind]}.done", item_id=item.item_id, content_index=0, **text)
            yield self._event("content_part.done", item_id=item.item_id, content_index=0, part=item.part())
        yield self._event("output_item.done", item=item.to_json(status))

    @property
    def _last_kind(self) -> Kind | None:
        return self._items[-1].kind if self._items else None

    def _say(self, kind: Kind, text: str, scores: Iterable[TokenScore]) -> Iterator[Json]:
        if self._last_kind != kind:
            yield from self._begin(kind)
        item, logprobs = self._items[-1], [token_with_top(score) for score in scores]
        item.pieces.append(text)
        item.logprobs += logprobs
        added = {"delta": text, **item.scored(logprobs)}
        yield self._event(f"{_TEXTS[kind]}.delta", item_id=item.item_id, content_index=0, **added)

    def _add_call(self, call: CallDelta) -> Iterator[Json]:
        if call.name is not None:
            kind, names = self._tools.called(call.name)
            yield from self._begin(kind, {"call_id": call.id, **names})
        item = self._items[-1]
        added = call.arguments if item.reader is None else item.reader.read(call.arguments)
        if added:
            item.pieces.append(added)
            yield self._event(f"{item.kind}_{_OF_CALLS[item.kind]}.delta", item_id=item.item_id, delta=added)

    def _begin(self, kind: Kind, call: Json | None = None) -> Iterator[Json]:
        if self._items:
            yield from self.end("completed")
        reader = InputReader() if kind == "custom_tool_call" else None
        item = _Item(f"{_ID_PREFIXES[kind]}_{self._suffix}_{len(self._items)}", kind, call, reader)
        self._items.append(item)
        yield self._event("output_item.added", item=item.to_json("in_progress", is_new=True))
        if call is None:
            yield self._event("content_part.added", item_id=item.item_id, content_index=0, part=item.part())

    def _event(self, name: str, /, **fields: object) -> Json:
        """Return an event about the last item."""
        return {"type": f"response.{name}", "output_index": len(self._items) - 1, **fields}
