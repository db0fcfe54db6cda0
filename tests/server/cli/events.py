"""The events that a stand-in server sends."""

from __future__ import annotations

import json


def events(*payloads: object) -> str:
    """Return a stream of these payloads, with the comments that keep a silent stream alive."""
    return "".join(f"id: 1\ndata: {p if isinstance(p, str) else json.dumps(p)}\n\n: keep-alive\n\n" for p in payloads)


def text_event(text: str) -> dict[str, object]:
    """Return the payload of an event of a completion."""
    return {"choices": [{"index": 0, "text": text}]}


def chat_event(content: str = "", *, reason: str | None = None, **delta: str) -> dict[str, object]:
    """Return the payload of an event of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": content, **delta}, "finish_reason": reason}]}
