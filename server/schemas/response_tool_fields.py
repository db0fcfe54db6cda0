"""The tools of a response's body and the choice of one: their fields, and the hosted tools that are left out.

OpenAI runs some tools itself, such as web_search. Clients offer them to every server, so they cost no error: the model
does not see them, and the names of their types are reported. `response_fields.py` calls this.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.core.errors import show
from gptserve.server.schemas.fields import FieldReader, Unread
from gptserve.server.schemas.response_tools import (
    OFFERED_TYPES,
    AllowedTools,
    CustomFormat,
    CustomTool,
    FunctionTool,
    NamedTool,
    NamespaceTool,
)

_MODELS: dict[str, type[BaseModel]] = {"custom": CustomTool, "namespace": NamespaceTool}
_INNER_TYPES = ("function", "custom")
_OF_TOOLS = dict.fromkeys(("output_schema", "allowed_callers", "defer_loading", "async"), Unread())


def take_tools(tools: Sequence[Any], reader: FieldReader) -> list[Any]:
    """Return the fields of tools; of those that are hosted only the type. Raises InvalidRequestError."""
    return [
        {"type": tool["type"]}
        if _is_left_out(f"tools[{i}]", tool, "tools.", reader)
        else _take_tool(f"tools[{i}]", tool, reader)
        for i, tool in enumerate(tools)
    ]


def take_choice(choice: Mapping[str, Any], reader: FieldReader) -> dict[str, object]:
    """Return the choice of tools. Raises InvalidRequestError, also for one that forces a hosted tool."""
    kind = choice.get("type")
    if kind != "allowed_tools":
        if isinstance(kind, str) and kind not in _INNER_TYPES:
            raise InvalidRequestError(_lack("tool_choice", kind), param="tool_choice", code="unsupported_parameter")
        return reader.take(choice, NamedTool, {}, "tool_choice.")
    taken = reader.take(choice, AllowedTools, {}, "tool_choice.")
    if isinstance(tools := taken.get("tools"), list):
        where = "tool_choice.tools."
        kept = [tool for i, tool in enumerate(tools) if not _is_left_out(f"{where[:-1]}[{i}]", tool, where, reader)]
        taken["tools"] = [reader.take(tool, NamedTool, {}, where) if isinstance(tool, dict) else tool for tool in kept]
    return taken


def _take_tool(where: str, tool: Any, reader: FieldReader, prefix: str = "tools.") -> Any:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    model = _MODELS.get(kind, FunctionTool) if isinstance(kind, str) else FunctionTool
    taken = reader.take(tool, model, _OF_TOOLS, prefix)
    if isinstance(wanted := taken.get("format"), dict):
        taken["format"] = wanted = reader.take(wanted, CustomFormat, {}, f"{prefix}format.")
        if wanted.get("syntax") == "lark":
            reader.leave_out(f"{prefix}format", f"{where}.format: a grammar in Lark is not enforced by this server")
    if isinstance(inner := taken.get("tools"), list):
        for i, one in enumerate(inner):
            kind = one.get("type") if isinstance(one, dict) else None
            if isinstance(kind, str) and kind not in _INNER_TYPES:
                place = f"{where}.tools[{i}]"
                raise InvalidRequestError(_lack(place, kind), param=place, code="unsupported_parameter")
        taken["tools"] = [
            _take_tool(f"{where}.tools[{i}]", one, reader, f"{prefix}tools.") for i, one in enumerate(inner)
        ]
    return taken


def _is_left_out(where: str, tool: Any, prefix: str, reader: FieldReader) -> bool:
    """Return whether a tool is of a type that this server lacks, after reporting it. Raises InvalidRequestError."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind in OFFERED_TYPES:
        return False
    if prefix + kind in reader.ignored:
        return True
    reader.leave_out(prefix + kind, _lack(where, kind))
    similar = difflib.get_close_matches(kind[:60], OFFERED_TYPES, n=1, cutoff=0.75)
    if similar:
        message = f"{where}.type: unknown type {show(kind)}; did you mean {similar[0]}?"
        raise InvalidRequestError(message, param=where)
    return True


def _lack(where: str, kind: str) -> str:
    return f"{where}: a tool of the type {show(kind)} is not supported by this server"
