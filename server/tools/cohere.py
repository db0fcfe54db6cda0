"""Command R7B, Command A: <|START_ACTION|> and a JSON array of {"tool_call_id": …, "tool_name": …, "parameters": …}.

Command R and R+ write `Action:` and a block of such an array without ids. Their template tells them of one more tool,
directly-answer, which means that no tool is needed: a client does not have it, so such a call stays text.
"""

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


def _head_in_block(name: str) -> str:
    return literal(f'    {{\n        "tool_name": "{name}",\n        "parameters": ')


_BLOCK = JsonList(
    "Action:",
    "```",
    around=("\n```json\n[\n", "\n]"),
    between=",\n",
    head=_head_in_block,
    name_key="tool_name",
    tail="\n    }",
    fence="```json",
    only_known=True,
)
COMMAND_R = _BLOCK.form("followed by a json-formatted list of actions", '"tool_name"')
