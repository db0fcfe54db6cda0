"""Kimi K2: a section of calls, each functions.NAME:INDEX and its arguments. That is the id of the call, too.

The chat template writes the id of a call in place of its name, so a client has to get the id that the model wrote.
"""

from __future__ import annotations

import re

from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_object
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.sections import Marks, read_sections
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.values import Tools

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID_CHARS = re.compile(r"[a-zA-Z0-9_.:-]+")
_ID = re.compile(r"(?:functions\.)?([a-zA-Z0-9_.-]{1,128})(?::[0-9]{1,9})?")


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    yield from read_sections(tape, parts, Marks(BEGIN, END, CALL, CALL_END), _read_call)


def _read_call(tape: Tape, parts: Parts) -> Steps[bool]:
    """Read a call up to the end of its arguments; return whether that came."""
    yield from tape.skip_space()
    found = _ID.fullmatch((yield from tape.take_run(_ID_CHARS)))
    yield from tape.skip_space()
    if found is None or not (yield from tape.accept(ARGUMENTS)):
        return False
    yield from tape.skip_space()
    if (yield from tape.peek()) != "{":
        return False
    tape.kept()
    parts.begin_call(found[1], found[0] if ":" in found[0] else None)
    return (yield from read_object(tape, parts.add_arguments))


def _rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        head = f"{spell(CALL)} {literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {spell(ARGUMENTS)}"
        return f"{head} {arguments} {spell(CALL_END)}"

    return f"calls: call {calls.repeated('')} {spell(END)}\ncall: {calls.either(call)}\n"


KIMI_K2 = ToolFormat(
    signs=(BEGIN, ARGUMENTS), begin=BEGIN, marks=(BEGIN, END, CALL, CALL_END, ARGUMENTS), read=_read, rules=_rules
)
