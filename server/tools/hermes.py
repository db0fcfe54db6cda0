r"""Hermes and Qwen: <tool_call>\n{"name": …, "arguments": …}\n</tool_call>, as many as there are calls."""

from __future__ import annotations

from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_call
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape, drop
from gptserve.server.tools.values import Tools

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    mark = yield from tape.pass_until((BEGIN,), parts.add_text)
    while mark:
        tape.keep()
        yield from tape.skip_space()
        if (yield from read_call(tape, parts)):
            mark = yield from tape.pass_until((END, BEGIN), drop)  # models may forget the end
            if mark == BEGIN:
                continue
            yield from tape.skip_space()
        else:
            parts.add_text(BEGIN + tape.kept())
        mark = yield from tape.pass_until((BEGIN,), parts.add_text)


def _rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        head = literal(f'\n{{"name": "{name}", "arguments": ')
        return f"{head} {arguments} {literal('}' + chr(10))} {spell(END)}"

    between = f"{literal(chr(10))} {spell(BEGIN)}"
    return f"calls: call {calls.repeated(between)}\ncall: {calls.either(call)}\n"


HERMES = ToolFormat(signs=(BEGIN,), begin=BEGIN, marks=(BEGIN, END), read=_read, rules=_rules)
