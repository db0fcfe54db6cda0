"""GLM-4.5 and later: <tool_call>name, then <arg_key>…</arg_key> and <arg_value>…</arg_value> for each argument.

GLM-4.5 and 4.6 have line ends between these, GLM-4.7 has none: a grammar leaves that to the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_name
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.value_rules import ValueSyntax, value_rules
from gptserve.server.tools.values import ArgumentWriter, Kind, Tools

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_LINE = '"\\n"?'
_MARKS = BEGIN, END, KEY, KEY_END, VALUE, VALUE_END


def _read(tape: Tape, parts: Parts, tools: Tools) -> Steps[None]:
    while (yield from tape.pass_until((BEGIN,), parts.add_text)):
        tape.keep()
        yield from tape.skip_space()
        name = yield from read_name(tape)
        yield from tape.skip_space()
        is_call = name and ((yield from tape.sees(KEY)) or (yield from tape.sees(END)))
        if not is_call:
            parts.add_text(BEGIN + tape.kept())
            continue
        tape.kept()
        parts.begin_call(name)
        yield from _read_arguments(tape, ArgumentWriter(parts, tools.get(name, {})))
        yield from tape.skip_space()


def _read_arguments(tape: Tape, writer: ArgumentWriter) -> Steps[None]:
    """Read arguments and the end of the call; a fault ends it."""
    while (yield from tape.accept(KEY)):
        pieces: list[str] = []
        if not (yield from tape.pass_until((KEY_END,), pieces.append)):
            return
        yield from tape.skip_space()
        if not (yield from tape.accept(VALUE)):
            return
        writer.key("".join(pieces).strip())
        if not (yield from writer.read(tape, (VALUE_END,))):
            return
        yield from tape.skip_space()
    if (yield from tape.accept(END)):
        writer.end()


def _rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        return f"{literal(name)} {_LINE} {arguments} {spell(END)}"

    return f"calls: call {calls.repeated(f'{_LINE} {spell(BEGIN)}')}\ncall: {calls.either(call)}\n"


def _argument_rules(arguments: Arguments, spell: Spell) -> Iterator[str]:
    after = f"{spell(KEY_END)} {_LINE} {spell(VALUE)}"
    kinds: dict[Kind, str] = {"text": after, "text or null": after, "json": after}
    return value_rules(arguments, ValueSyntax(spell(KEY), kinds, spell(VALUE_END), _LINE, VALUE_END))


GLM = ToolFormat((BEGIN, KEY), BEGIN, _MARKS, _read, _rules, _argument_rules)
