"""Calls that are made of elements, each argument in one of its own: Qwen3-Coder's, MiniMax's, DeepSeek's of 2026.

    <tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>

A format says by `Elements` how these are spelled, and gets its reader and its rules here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import NAME
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.value_rules import ValueSyntax, value_rules
from gptserve.server.tools.values import ArgumentWriter, Kind, Tools

_NAME_CHARS = re.compile(r"[a-zA-Z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Elements:
    """The spelling of calls.

    A call stands between `function` with its name and `function_end`. The values of its arguments stand between one of
    `texts` and `jsons`, with the name, and `value_end`; where these differ they tell what the value is, and else the
    schema does. `line` is the white space between elements, `value_line` that around a value. With `has_own_marks` each
    call stands between `begin` and `end`, else all of them do.
    """

    begin: str
    end: str
    function: tuple[str, str]
    function_end: str
    parameter: str
    text: str
    json: str
    value_end: str
    line: str = "\n"
    value_line: str = ""
    has_own_marks: bool = True

    def form(self, *signs: str) -> ToolFormat:
        """Return the format of models whose chat template has these signs."""
        return ToolFormat(
            signs=signs,
            begin=self.begin,
            marks=(self.begin, self.end),
            read=partial(_read, elements=self),
            rules=partial(_rules, elements=self),
            arguments=partial(_argument_rules, elements=self),
        )


def _read(tape: Tape, parts: Parts, tools: Tools, *, elements: Elements) -> Steps[None]:
    mark = yield from tape.pass_until(_begins(elements), parts.add_text)
    while mark:
        tape.keep()
        if mark == elements.begin:
            yield from tape.skip_space()
            is_call = yield from tape.accept(elements.function[0])
        else:
            is_call = True
        if not is_call or not (yield from _read_call(tape, parts, tools, elements)):
            parts.add_text(mark + tape.kept())
            mark = yield from tape.pass_until(_begins(elements), parts.add_text)
            continue
        yield from tape.skip_space()
        if (yield from tape.accept(elements.end)):
            yield from tape.skip_space()
        mark = yield from tape.pass_until(_begins(elements), parts.add_text)


def _begins(elements: Elements) -> tuple[str, ...]:
    """Return what a call begins with: models may forget the mark before it."""
    return elements.begin, elements.function[0]


def _read_call(tape: Tape, parts: Parts, tools: Tools, elements: Elements) -> Steps[bool]:
    """Read a call from its name on; return whether it is one. Once it has begun, a fault ends it."""
    pieces: list[str] = []
    yield from tape.pass_run(_NAME_CHARS, pieces.append)
    name = "".join(pieces)
    if NAME.fullmatch(name) is None or not (yield from tape.accept(elements.function[1])):
        return False
    tape.kept()
    parts.begin_call(name)
    writer = ArgumentWriter(parts, tools.get(name, {}))
    while True:
        yield from tape.skip_space()
        if (yield from tape.accept(elements.function_end)):
            writer.end()
            return True
        if not (yield from tape.accept(elements.parameter)):
            return True
        if not (yield from _read_argument(tape, writer, elements)):
            return True


def _read_argument(tape: Tape, writer: ArgumentWriter, elements: Elements) -> Steps[bool]:
    """Read an argument from its name on; return whether its end came."""
    marks = (elements.text, elements.json)
    pieces: list[str] = []
    mark = yield from tape.pass_until(marks, pieces.append)
    if not mark:
        return False
    writer.key("".join(pieces).strip())
    kinds: dict[str, Kind] = {elements.text: "text", elements.json: "json"}
    if elements.value_line:
        yield from tape.accept(elements.value_line)
    ends = (elements.value_line + elements.value_end, elements.value_end)
    return bool((yield from writer.read(tape, ends, kinds[mark] if len(kinds) > 1 else None)))


def _rules(calls: Calls, spell: Spell, *, elements: Elements) -> str:
    line = literal(elements.line) if elements.line else ""
    begin, end = spell(elements.begin), spell(elements.end)

    def call(name: str, arguments: str) -> str:
        head = literal(elements.function[0] + name + elements.function[1] + elements.line)
        return f"{line} {head} {arguments} {literal(elements.function_end)}"

    if elements.has_own_marks:
        return f"calls: call {calls.repeated(f'{line} {begin}')}\ncall: ({calls.either(call)}) {line} {end}\n"
    return f"calls: call {calls.repeated('')} {line} {end}\ncall: {calls.either(call)}\n"


def _argument_rules(arguments: Arguments, spell: Spell, *, elements: Elements) -> Sequence[str]:
    text, after = (literal(mark + elements.value_line) for mark in (elements.text, elements.json))
    end = spell(elements.value_end)
    if end.startswith('"'):  # else the text may end with the white space
        end = literal(elements.value_line + elements.value_end)
    kinds: dict[Kind, str] = {"text": text, "text or null": text, "json": after}
    between = literal(elements.line) if elements.line else ""
    return value_rules(arguments, ValueSyntax(literal(elements.parameter), kinds, end, between, elements.value_end))
