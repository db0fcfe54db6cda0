"""Calls that are made of elements, each argument in one of its own: Qwen3-Coder's, MiniMax's, DeepSeek's of 2026.

    <tool_call><function=get_weather><parameter=city>Oslo</parameter></function></tool_call>

A format says by `Elements` how these are spelled, and gets its reader and its rules here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_name
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.value_rules import ValueSyntax, value_rules
from gptserve.server.tools.values import ArgumentWriter, Kind, Tools


@dataclass(frozen=True, slots=True)
class Elements:
    """The spelling of calls.

    A call stands between `function` with its name and `function_end`. The values of its arguments stand between one of
    `text` and `json`, after the name, and `value_end`; where these differ they tell what the value is, and else the
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
            read=self._read,
            rules=self._rules,
            arguments=self._argument_rules,
        )

    def _read(self, tape: Tape, parts: Parts, tools: Tools) -> Steps[None]:
        begins = self.begin, self.function[0]  # models may forget the mark before a call
        while mark := (yield from tape.pass_until(begins, parts.add_text)):
            tape.keep()
            is_call = True
            if mark == self.begin:
                yield from tape.skip_space()
                is_call = yield from tape.accept(self.function[0])
            if not is_call or not (yield from self._read_call(tape, parts, tools)):
                parts.add_text(mark + tape.kept())
                continue
            yield from tape.skip_space()
            if (yield from tape.accept(self.end)):
                yield from tape.skip_space()

    def _read_call(self, tape: Tape, parts: Parts, tools: Tools) -> Steps[bool]:
        """Read a call from its name on; return whether it is one. Once it has begun, a fault ends it."""
        name = yield from read_name(tape)
        if not name or not (yield from tape.accept(self.function[1])):
            return False
        tape.kept()
        parts.begin_call(name)
        writer = ArgumentWriter(parts, tools.get(name, {}))
        while True:
            yield from tape.skip_space()
            if (yield from tape.accept(self.function_end)):
                writer.end()
                return True
            if not (yield from tape.accept(self.parameter)) or not (yield from self._read_argument(tape, writer)):
                return True

    def _read_argument(self, tape: Tape, writer: ArgumentWriter) -> Steps[bool]:
        """Read an argument from its name on; return whether its end came."""
        pieces: list[str] = []
        mark = yield from tape.pass_until((self.text, self.json), pieces.append)
        if not mark:
            return False
        writer.key("".join(pieces).strip())
        kinds: dict[str, Kind] = {self.text: "text", self.json: "json"}
        yield from tape.accept(self.value_line)
        ends = (self.value_line + self.value_end, self.value_end)
        return bool((yield from writer.read(tape, ends, kinds[mark] if len(kinds) > 1 else None)))

    def _rules(self, calls: Calls, spell: Spell) -> str:
        line = literal(self.line) if self.line else ""
        begin, end = spell(self.begin), spell(self.end)

        def call(name: str, arguments: str) -> str:
            head = literal(self.function[0] + name + self.function[1] + self.line)
            return f"{line} {head} {arguments} {literal(self.function_end)}"

        if self.has_own_marks:
            return f"calls: call {calls.repeated(f'{line} {begin}')}\ncall: ({calls.either(call)}) {line} {end}\n"
        return f"calls: call {calls.repeated('')} {line} {end}\ncall: {calls.either(call)}\n"

    def _argument_rules(self, arguments: Arguments, spell: Spell) -> Iterator[str]:
        text, after = (literal(mark + self.value_line) for mark in (self.text, self.json))
        end = spell(self.value_end)
        if end.startswith('"'):  # else the text may end with the white space
            end = literal(self.value_line + self.value_end)
        kinds: dict[Kind, str] = {"text": text, "text or null": text, "json": after}
        between = literal(self.line) if self.line else ""
        return value_rules(arguments, ValueSyntax(literal(self.parameter), kinds, end, between, self.value_end))
