"""From the messages of Anthropic's API to those of a chat. Knows neither tokens nor HTTP; `plan.py` calls it.

A turn is one message: what one side says in several is joined. Results of calls are messages of the role tool, before
what the user says beside them.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.schemas.messages import (
    TextBlock,
    ThinkingBlock,
    TokenCountRequest,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)

UNSIGNED = "unsigned"
"""The signature of thinking that is in the clear: clients drop a block without one."""
_Message = dict[str, Any]


def to_chat_messages(asked: TokenCountRequest) -> list[_Message]:
    """Return the messages of the chat. Raises InvalidRequestError if the last one has calls without results."""
    messages: list[_Message] = []
    if asked.system:
        texts = [asked.system] if isinstance(asked.system, str) else [block.text for block in asked.system]
        messages.append({"role": "system", "content": _parts(texts)})
    for message in asked.messages:
        added = _assistants(message) if message.role == "assistant" else _others(message)
        for one in added:
            last = messages[-1] if messages else {}
            if one["role"] == last.get("role") and one["role"] in ("user", "assistant"):
                for name, values in one.items():
                    if isinstance(values, list):
                        last.setdefault(name, []).extend(values)
            else:
                messages.append(one)
    last = messages[-1]
    if "tool_calls" in last:
        where = f"messages[{len(asked.messages) - 1}]"
        raise InvalidRequestError(f"{where}: each tool_use must have a tool_result in the next message", param=where)
    for one in messages:
        if thoughts := one.pop("thoughts", None):
            one["reasoning_content"] = "\n".join(thoughts)
    return messages


def signature_of(thinking: str) -> str:
    """Return the signature that has the thinking, for an answer that leaves it out."""
    return b64encode(thinking.encode()).decode()


def _thinking_in(block: ThinkingBlock) -> str:
    """Return the thinking of a block, which may be in the signature; nothing if another server has signed it."""
    if block.thinking or block.signature in (None, UNSIGNED):
        return block.thinking
    try:
        return b64decode(block.signature or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _others(message: TurnMessage) -> Iterable[_Message]:
    """Yield the messages of a turn of the user, or of the system: results, then what is said."""
    blocks = message.blocks
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        error = ["Error:"] if result.is_error else []
        content = _parts([*error, *_texts_of(result.content or "")])
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if texts or not results:
        yield {"role": message.role, "content": _parts(texts)}


def _assistants(message: TurnMessage) -> Iterable[_Message]:
    """Yield the message of a turn of the assistant."""
    blocks = message.blocks
    thoughts = [_thinking_in(block) for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    yield {
        "role": "assistant",
        "content": _parts(block.text for block in blocks if isinstance(block, TextBlock)),
        **({"tool_calls": calls} if calls else {}),
        **({"thoughts": said} if (said := list(filter(None, thoughts))) else {}),
    }


def _call(block: ToolUseBlock) -> _Message:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _texts_of(content: str | Sequence[TextBlock | ToolReferenceBlock]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _parts(texts: Iterable[str]) -> list[_Message]:
    return [{"type": "text", "text": text} for text in texts]
