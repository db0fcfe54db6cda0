"""Command R7B, Command A: <|START_ACTION|> and a JSON array of {"tool_call_id": …, "tool_name": …, "parameters": …}."""

from __future__ import annotations

import re

from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_call
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape, drop
from gptserve.server.tools.values import Tools

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
_BEFORE_ID = '\n    {"tool_call_id": "'
_BETWEEN = re.compile(r"[, \t\r\n]+")


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    while (yield from tape.pass_until((BEGIN,), parts.add_text)):
        tape.keep()
        yield from tape.skip_space()
        is_array, num_before = (yield from tape.accept("[")), parts.num_calls
        yield from tape.skip_space()
        while (yield from read_call(tape, parts, name_key="tool_name")):
            yield from tape.pass_run(_BETWEEN, drop)
            tape.keep()
        if parts.num_calls == num_before:
            parts.add_text(BEGIN + tape.kept())
            continue
        parts.add_text(tape.kept())
        if is_array:
            yield from tape.accept("]")
            yield from tape.skip_space()
        if (yield from tape.accept(END)):
            yield from tape.skip_space()


def _rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        before, after = literal(_BEFORE_ID), literal(f'", "tool_name": "{name}", "parameters": ')
        return f"{before} /[0-9]{{1,3}}/ {after} {arguments} {literal('}')}"

    rest, last = calls.repeated(literal(",")), literal("\n]")
    return f"calls: {literal('[')} call {rest} {last} {spell(END)}\ncall: {calls.either(call)}\n"


COHERE = ToolFormat(signs=(BEGIN, '"tool_name"'), begin=BEGIN, marks=(BEGIN, END), read=_read, rules=_rules)
