"""Gemma 4: <|tool_call>call:NAME{key:value,…}<tool_call|>. Keys are bare, and strings stand between marks, as they are.

Objects and arrays within the arguments are written alike. Values of JSON are read, too: a grammar forces those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_name
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.python_literal import read_literal
from gptserve.server.tools.pythonic import listed_rules
from gptserve.server.tools.tape import Emit, Steps, Tape, drop
from gptserve.server.tools.values import Tools

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_MAX_DEPTH = 64
_KEY_CHARS = re.compile(r"[^\s:,{}\[\]\"<]+")


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    mark = yield from tape.pass_until((BEGIN,), parts.add_text)
    while mark:
        tape.keep()
        if (yield from _read_call(tape, parts)):
            mark = yield from tape.pass_until((END, BEGIN), drop)
            if mark == BEGIN:
                continue
            yield from tape.skip_space()
        else:
            parts.add_text(BEGIN + tape.kept())
        mark = yield from tape.pass_until((BEGIN,), parts.add_text)


def _read_call(tape: Tape, parts: Parts) -> Steps[bool]:
    """Read a call; return whether it is one. Once it has begun, a fault ends it."""
    yield from tape.skip_space()
    name = (yield from read_name(tape)) if (yield from tape.accept("call:")) else ""
    if not name or (yield from tape.peek()) != "{":
        return False
    tape.kept()
    parts.begin_call(name)
    tape.read()
    yield from tape.skip_space()
    # A model may repeat the braces: its template has them around arguments that came as a text.
    is_twice = yield from tape.accept("{")
    if (yield from _read_object(tape, parts.add_arguments, _MAX_DEPTH)) and is_twice:
        yield from tape.skip_space()
        yield from tape.accept("}")
    return True


def _read_object(tape: Tape, emit: Emit, depth: int) -> Steps[bool]:
    """Pass the JSON of an object on, of which the first brace was read; return whether it came whole."""
    emit("{")
    between = ""
    while True:
        yield from tape.skip_space()
        if (yield from tape.accept("}")):
            emit("}")
            return True
        key = yield from _read_key(tape)
        yield from tape.skip_space()
        if key is None or not (yield from tape.accept(":")):
            return False
        emit(f"{between}{key}: ")
        if not (yield from _read_value(tape, emit, depth)):
            return False
        between = ", "
        yield from tape.skip_space()
        if not (yield from tape.accept(",")) and not (yield from tape.sees("}")):
            return False


def _read_array(tape: Tape, emit: Emit, depth: int) -> Steps[bool]:
    """Pass the JSON of an array on, of which the first bracket was read; return whether it came whole."""
    emit("[")
    between = ""
    while True:
        yield from tape.skip_space()
        if (yield from tape.accept("]")):
            emit("]")
            return True
        emit(between)
        if not (yield from _read_value(tape, emit, depth)):
            return False
        between = ", "
        yield from tape.skip_space()
        if not (yield from tape.accept(",")) and not (yield from tape.sees("]")):
            return False


def _read_key(tape: Tape) -> Steps[str | None]:
    """Return the JSON of a key, bare or a string; None if none comes."""
    pieces = list[str]()
    if (yield from tape.peek()) == '"' or (yield from tape.sees(QUOTE)):
        return "".join(pieces) if (yield from _read_value(tape, pieces.append, 0)) else None
    key = yield from tape.take_run(_KEY_CHARS)
    return json.dumps(key, ensure_ascii=False) if key else None


def _read_value(tape: Tape, emit: Emit, depth: int) -> Steps[bool]:
    """Pass the JSON of a value on; return whether it came whole."""
    yield from tape.skip_space()
    if (yield from tape.accept(QUOTE)):
        emit('"')
        end = yield from tape.pass_until((QUOTE,), lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))
        emit('"' if end else "")
        return end != ""
    for bracket, read in (("{", _read_object), ("[", _read_array)):
        if (yield from tape.sees(bracket)):
            tape.read()
            return depth > 0 and (yield from read(tape, emit, depth - 1))
    return (yield from read_literal(tape, emit))


def _rules(calls: Calls, spell: Spell) -> str:
    call = calls.either(
        lambda name, arguments: f"{literal(f'call:{name}' + '{')} {arguments} {literal('}')} {spell(END)}"
    )
    return f"calls: call {calls.repeated(spell(BEGIN))}\ncall: {call}\n"


def _argument_rules(arguments: Arguments, _spell: Spell) -> Iterator[str]:
    return listed_rules(arguments, ":", ",", ("true", "false"))


GEMMA_4 = ToolFormat(
    signs=(f"{BEGIN}call:",),
    begin=BEGIN,
    marks=(BEGIN, END, QUOTE),
    read=_read,
    rules=_rules,
    arguments=_argument_rules,
)
