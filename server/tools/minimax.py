"""MiniMax. M1 writes a JSON object a line between <tool_calls> and </tool_calls>, M2 elements <invoke name="…">."""

from __future__ import annotations

from gptserve.server.tools.elements import Elements
from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_call
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.values import Tools

BEGIN, END = "<tool_calls>", "</tool_calls>"


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    while (yield from tape.pass_until((BEGIN,), parts.add_text)):
        num_before = parts.num_calls
        tape.keep()
        yield from tape.skip_space()
        while (yield from read_call(tape, parts)):
            yield from tape.skip_space()
            tape.keep()
        kept = tape.kept()
        parts.add_text(kept if parts.num_calls > num_before else BEGIN + kept)
        if parts.num_calls > num_before and (yield from tape.accept(END)):
            yield from tape.skip_space()


def _rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        head = literal(f'\n{{"name": "{name}", "arguments": ')
        return f"{head} {arguments} {literal('}')}"

    return f"calls: call {calls.repeated('')} {literal(chr(10))} {spell(END)}\ncall: {calls.either(call)}\n"


MINIMAX_M1 = ToolFormat(signs=(f"{BEGIN}{END} XML tags",), begin=BEGIN, marks=(BEGIN, END), read=_read, rules=_rules)
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
