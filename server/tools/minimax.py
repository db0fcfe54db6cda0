"""MiniMax. M1 writes a JSON object a line between <tool_calls> and </tool_calls>, M2 elements <invoke name="…">."""

from __future__ import annotations

from gptserve.server.tools.elements import Elements
from gptserve.server.tools.json_list import JsonList

BEGIN, END = "<tool_calls>", "</tool_calls>"
MINIMAX_M1 = JsonList(BEGIN, END, around=("\n", "\n"), between="\n").form(f"please respond with {BEGIN}{END} XML tags")
MINIMAX_M2 = Elements(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    function=('<invoke name="', '">'),
    function_end="</invoke>",
    parameter='<parameter name="',
    text='">',
    json='">',
    value_end="</parameter>",
    has_own_marks=False,
).form("<minimax:tool_call>", '<invoke name="')
