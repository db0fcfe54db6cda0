"""The tools of a response's body and the choice of one: their fields, and the hosted tools that are left out.

OpenAI runs some tools itself, such as web_search. Clients offer them to every server, so they cost no error: the model
does not see them, and the names of their types are reported. `response_fields.py` calls this.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
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


def take_tool(where: str, tool: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    """Return the fields of a tool; of one that is hosted only the type. Raises InvalidRequestError."""
    if _is_left_out(where, tool, "tools.", reader):
        return {"type": tool["type"]}
    return _take_offered(where, tool, reader)


def take_choice(choice: Mapping[str, Any], reader: FieldReader) -> dict[str, object]:
    """Return the choice of tools. Raises InvalidRequestError, also for one that forces a hosted tool."""
    kind = choice.get("type")
    if kind != "allowed_tools":
        if isinstance(kind, str) and kind not in _INNER_TYPES:
            raise InvalidRequestError(_lack("tool_choice", kind), param="tool_choice", code="unsupported_parameter")
        return reader.take(choice, NamedTool, {}, "tool_choice.")
    taken = reader.take(choice, AllowedTools, {}, "tool_choice.")
    if isinstance(tools := taken.get("tools"), list):
        where = "tool_choice.tools"
        taken["tools"] = [
            tool for i, tool in enumerate(tools) if not _is_left_out(f"{where}[{i}]", tool, f"{where}.", reader)
        ]
        reader.take_each(taken, "tools", lambda _, tool, its: its.take(tool, NamedTool, {}, f"{where}."))
    return taken


def _take_offered(where: str, tool: dict[str, Any], reader: FieldReader, prefix: str = "tools.") -> dict[str, object]:
    kind = tool.get("type")
    model = _MODELS.get(kind, FunctionTool) if isinstance(kind, str) else FunctionTool
    taken = reader.take(tool, model, _OF_TOOLS, prefix)
    if reader.take_inner(taken, "format", CustomFormat, where=prefix).get("syntax") == "lark":
        reader.leave_out(f"{prefix}format", f"{where}.format: a grammar in Lark is not enforced by this server")
    reader.take_each(taken, "tools", _take_inner, f"{where}.")
    return taken


def _take_inner(where: str, tool: dict[str, Any], reader: FieldReader) -> dict[str, object]:
    """Return the fields of a tool of a namespace. Raises InvalidRequestError for one that is hosted."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind not in _INNER_TYPES:
        raise InvalidRequestError(_lack(where, kind), param=where, code="unsupported_parameter")
    return _take_offered(where, tool, reader, "tools.tools.")


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
