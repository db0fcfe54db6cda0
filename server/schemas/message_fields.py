"""The fields of a message's body that its model does not have, and the blocks and tools that this server lacks.

Media and other blocks that cannot be left out are refused by name. Tools that Anthropic runs or defines are left out
and reported, as clients offer them to every server. `cache_control` asks for nothing: all prefixes are cached.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.core.errors import show
from gptserve.server.schemas.fields import FieldReader, Unread
from gptserve.server.schemas.messages import (
    ClientTool,
    JsonOutput,
    MessageMetadata,
    MessagesRequest,
    MessageToolChoice,
    OutputConfig,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
    is_client_tool,
)

_HINT = Unread()

UNREAD: dict[str, Unread] = {
    **dict.fromkeys(("cache_control", "service_tier", "inference_geo", "speed", "diagnostics"), _HINT),
    **dict.fromkeys(("user_profile_id", "workspace_id", "betas", "context_management"), _HINT),
    "container": Unread((), "a container is"),
    "mcp_servers": Unread(([],), "a server of MCP that this server calls is"),
}
"""Fields of Anthropic's API."""

_CACHED = {"cache_control": _HINT}
_OF_TEXTS = {**_CACHED, "citations": _HINT}
_OF_TOOLS = {
    **_CACHED,
    **dict.fromkeys(("defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"), _HINT),
}
_OF_CALLS = {**_CACHED, **dict.fromkeys(("caller", "toolset_name"), _HINT)}
_TEXT: dict[str, type[BaseModel]] = {"text": TextBlock}
_BLOCKS: dict[object, dict[str, type[BaseModel]]] = {
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {**_TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": _TEXT,
}
_RESULTS: dict[str, type[BaseModel]] = {**_TEXT, "tool_reference": ToolReferenceBlock}
_REDACTED = "redacted_thinking"


def take_message_fields(
    given: Mapping[str, object], model: type[BaseModel], *, strict: bool = False
) -> tuple[dict[str, object], list[str]]:
    """Return the fields of a body that its model reads, and the names of unknown ones.

    `strict` refuses the latter. Raises InvalidRequestError.
    """
    reader = FieldReader(strict)
    of_messages = {} if model is MessagesRequest else {"max_tokens": _HINT}  # which a count does not depend on
    edits = given.get("context_management")
    if edits is not None and not _keeps_all(edits):
        reader.leave_out("context_management", "context_management: no edit is supported by this server")
    taken = reader.take(given, model, {**UNREAD, **of_messages})
    for name, its_model in (
        ("thinking", Thinking),
        ("tool_choice", MessageToolChoice),
        ("output_config", OutputConfig),
        ("output_format", JsonOutput),
        ("metadata", MessageMetadata),
    ):
        reader.take_inner(reader.take_inner(taken, name, its_model), "format", JsonOutput, where=f"{name}.")
    reader.take_each(taken, "messages", _take_message)
    if isinstance(system := taken.get("system"), list):
        taken["system"] = _take_blocks("system", system, _TEXT, "the system", reader)
    reader.take_each(taken, "tools", _take_tool)
    return taken, list(reader.ignored)


def _keeps_all(value: object) -> bool:
    """Return whether this context management changes nothing."""
    edits = value.get("edits") if isinstance(value, dict) and value.keys() <= {"edits"} else None
    neutral = {"type": "clear_thinking_20251015", "keep": "all"}
    return isinstance(edits, list) and all(edit == neutral for edit in edits)


def _take_message(where: str, message: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    taken = reader.take(message, TurnMessage, _CACHED, "messages.")
    role = taken.get("role")
    known = _BLOCKS.get(role) if isinstance(role, str) else None
    if known is not None and isinstance(content := taken.get("content"), list):
        taken["content"] = _take_blocks(f"{where}.content", content, known, f"a message of the role {role}", reader)
    return taken


def _take_blocks(
    where: str, blocks: Sequence[Any], known: Mapping[str, type[BaseModel]], holder: str, reader: FieldReader
) -> list[Any]:
    """Return the fields of blocks but those of redacted thinking, which only its server can read."""
    taken = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if isinstance(block, dict) and block.get("type") == _REDACTED and "thinking" in known:
            reader.leave_out(f"messages.content.{_REDACTED}", f"{place}: {_REDACTED} cannot be read by this server")
            continue
        taken.append(_take_block(place, block, known, holder, reader))
    return taken


def _take_block(where: str, block: Any, known: Mapping[str, type[BaseModel]], holder: str, reader: FieldReader) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        return block
    if kind not in known:
        is_known = any(kind in kinds for kinds in (*_BLOCKS.values(), _RESULTS))
        lack = f"may not be in {holder}" if is_known else "is not supported by this server"
        raise InvalidRequestError(f"{where}: a block of the type {show(kind)} {lack}", param=where)
    unread = _OF_TEXTS if kind == "text" else _OF_CALLS
    taken = reader.take(block, known[kind], unread, "messages.content.")
    if kind == "tool_result" and isinstance(content := taken.get("content"), list):
        taken["content"] = _take_blocks(f"{where}.content", content, _RESULTS, "a tool_result", reader)
    return taken


def _take_tool(where: str, tool: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    kind = tool.get("type")
    if not isinstance(kind, str) or is_client_tool(kind):
        return reader.take(tool, ClientTool, _OF_TOOLS, "tools.")
    if difflib.get_close_matches(kind[:60], ["custom"], n=1, cutoff=0.75):
        raise InvalidRequestError(f"{where}.type: unknown type {show(kind)}; did you mean custom?", param=where)
    if f"tools.{kind}" not in reader.ignored:
        reader.leave_out(f"tools.{kind}", f"{where}: a tool of the type {show(kind)} is not supported by this server")
    return {"type": kind}
