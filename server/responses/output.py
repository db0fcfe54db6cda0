"""From the additions to an answer to the items of a response, and the events that tell of them in OpenAI's order.

The events depend on the additions alone, so every reader of the same tokens gets the same ones. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from gptserve.server.completions.output import Delta, EndReason, TokenScore
from gptserve.server.completions.shapes import Json, token_with_top

Kind = Literal["message", "reasoning"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

_ID_PREFIXES = {"message": "msg", "reasoning": "rs"}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseOutput:
    """The output of one response while its tokens arrive: reasoning and messages, each an item with one part.

    With `marks_reasoning` only tokens of a message have logprobs. These lists are iterators, each to be used once.
    """

    def __init__(self, response_id: str, *, marks_reasoning: bool) -> None:
        self.finish_reason: EndReason | None = None
        self.num_reasoning_tokens = 0
        self._suffix = response_id.partition("_")[2]
        self._marks_reasoning = marks_reasoning
        self._closed: list[Json] = []
        self._open: Kind | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []

    def items(self, status: ItemStatus) -> list[Json]:
        """Return the items so far; `status` is that of the one that is open."""
        return [*self._closed, *([] if self._open is None else [self._item(self._open, status, [self._part()])])]

    @property
    def num_entries(self) -> int:
        """The number of logprobs that the end of the open item has."""
        return len(self._logprobs)

    def add(self, delta: Delta) -> Iterator[Json]:
        """Add what came next; yield the events, without their numbers. Use up the iterator."""
        if delta.reasoning:
            self.num_reasoning_tokens += len(delta.token_ids or ())
            yield from self._say("reasoning", delta.reasoning, ())
        is_scored = bool(delta.logprobs) and (self._open == "message" or not self._marks_reasoning)
        if delta.text or is_scored:
            yield from self._say("message", delta.text, delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if self._open is None:
                yield from self._begin("message")

    def end(self, status: ItemStatus) -> Iterator[Json]:
        """End the open item; yield the events."""
        assert self._open is not None
        item = self._item(self._open, status, [self._part()])
        text = self._part()["text"]
        yield self._event(f"{_TEXTS[self._open]}.done", content_index=0, text=text, **self._scored(self._logprobs))
        yield self._event("content_part.done", content_index=0, part=self._part())
        yield self._event("output_item.done", item={**item, "content": [self._part()]})
        self._closed.append(item)
        self._open = None

    def _say(self, kind: Kind, text: str, scores: Iterable[TokenScore]) -> Iterator[Json]:
        if self._open != kind:
            if self._open is not None:
                yield from self.end("completed")
            yield from self._begin(kind)
        logprobs = [token_with_top(score) for score in scores]
        self._pieces.append(text)
        self._logprobs += logprobs
        yield self._event(f"{_TEXTS[kind]}.delta", content_index=0, delta=text, **self._scored(logprobs))

    def _begin(self, kind: Kind) -> Iterator[Json]:
        self._open, self._pieces, self._logprobs = kind, [], []
        yield self._event("output_item.added", item=self._item(kind, "in_progress", []))
        yield self._event("content_part.added", content_index=0, part=self._part())

    def _event(self, name: str, **fields: object) -> Json:
        """Return an event about the open item."""
        of_item = {} if "item" in fields else {"item_id": self._item_id()}
        return {"type": f"response.{name}", "output_index": len(self._closed), **of_item, **fields}

    def _item(self, kind: Kind, status: ItemStatus, content: list[Json]) -> Json:
        own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        return {"id": self._item_id(), "type": kind, "status": status, **own, "content": content}

    def _item_id(self) -> str:
        assert self._open is not None
        return f"{_ID_PREFIXES[self._open]}_{self._suffix}_{len(self._closed)}"

    def _part(self) -> Json:
        """Return the only part of the open item."""
        assert self._open is not None
        own: Json = {"annotations": []} if self._open == "message" else {}
        return {"type": _TEXTS[self._open], "text": "".join(self._pieces), **own, **self._scored(self._logprobs)}

    def _scored(self, logprobs: list[Json]) -> Json:
        return {"logprobs": iter(logprobs)} if self._open == "message" else {}
