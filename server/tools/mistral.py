"""Mistral: [TOOL_CALLS] and a JSON array of calls; from the eleventh tokenizer on [TOOL_CALLS]name[ARGS]{…} each."""

from __future__ import annotations

import re

from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_call, read_name, read_object
from gptserve.server.tools.json_list import JsonList
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape, drop
from gptserve.server.tools.values import Tools

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARS = re.compile(r"[a-zA-Z0-9]+")
_BETWEEN = re.compile(r"[, \t\r\n]+")


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    while (yield from tape.pass_until((BEGIN,), parts.add_text)):
        tape.keep()
        yield from tape.skip_space()
        is_array = yield from tape.accept("[")
        if is_array or (yield from tape.peek()) == "{":
            is_call = yield from _read_objects(tape, parts, is_array)
        else:
            is_call = yield from _read_named(tape, parts)
        if not is_call:
            parts.add_text(BEGIN + tape.kept())


def _read_objects(tape: Tape, parts: Parts, is_array: bool) -> Steps[bool]:
    """Read one object, or those of an array to its end; return whether the first is a call."""
    yield from tape.skip_space()
    if not (yield from read_call(tape, parts)):
        return False
    while is_array:
        yield from tape.pass_run(_BETWEEN, drop)
        if (yield from tape.accept("]")):
            break
        tape.keep()
        if not (yield from read_call(tape, parts)):
            parts.add_text(tape.kept())
            return True
    yield from tape.skip_space()
    return True


def _read_named(tape: Tape, parts: Parts) -> Steps[bool]:
    name = yield from read_name(tape)
    if (yield from tape.accept(ID)):
        yield from tape.pass_run(_ID_CHARS, drop)
    yield from tape.accept(ARGUMENTS)
    yield from tape.skip_space()
    if not name or (yield from tape.peek()) != "{":
        return False
    tape.kept()
    parts.begin_call(name)
    yield from read_object(tape, parts.add_arguments)
    yield from tape.skip_space()
    return True


def _named_rules(calls: Calls, spell: Spell) -> str:
    call = calls.either(lambda name, arguments: f"{literal(name)} {spell(ARGUMENTS)} {arguments}")
    return f"calls: call {calls.repeated(spell(BEGIN))}\ncall: {call}\n"


_MARKS = BEGIN, ID, ARGUMENTS
MISTRAL = ToolFormat(signs=(BEGIN,), begin=BEGIN, marks=_MARKS, read=_read, rules=JsonList(BEGIN, "").rules)
MISTRAL_V11 = ToolFormat(signs=(BEGIN, ARGUMENTS), begin=BEGIN, marks=_MARKS, read=_read, rules=_named_rules)
