"""Command R7B, Command A: <|START_ACTION|> and a JSON array of {"tool_call_id": …, "tool_name": …, "parameters": …}."""

from __future__ import annotations

from gptserve.server.tools.format import literal
from gptserve.server.tools.json_list import JsonList

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
_BEFORE_ID = '\n    {"tool_call_id": "'


def _head(name: str) -> str:
    after_id = f'", "tool_name": "{name}", "parameters": '
    return f"{literal(_BEFORE_ID)} /[0-9]{{1,3}}/ {literal(after_id)}"


_LIST = JsonList(BEGIN, END, around=("[", "\n]"), between=",", head=_head, name_key="tool_name")
COHERE = _LIST.form(BEGIN, '"tool_name"')
