"""Calls that are JSON objects between two marks, in an array or one after the other.

Apriel has <tool_calls>[{"name": …, "arguments": …}]</tool_calls>, Nemotron Nano 2 <TOOLCALL>, Granite 3 <|tool_call|>.
A format says by a `JsonList` how it spells them; Cohere's and MiniMax's are made so, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_call
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape, drop
from gptserve.server.tools.values import Tools

_BETWEEN = re.compile(r"[, \t\r\n]+")


def head_of(name: str) -> str:
    """Return the beginning of a call, up to its arguments, in Lark."""
    return literal(f'{{"name": "{name}", "arguments": ')


@dataclass(frozen=True, slots=True)
class JsonList:
    """The spelling: the marks `begin` and `end`, "" for none; the texts around calls and between them.

    `head` returns the symbols before the arguments of a call by the name of its tool, which stands at `name_key`;
    `tail` is the text after them. Between `begin` and the calls stands `fence`, perhaps after white space. Calls of
    tools that nobody has are text with `only_known`.
    """

    begin: str
    end: str
    around: tuple[str, str] = ("[", "]")
    between: str = ", "
    head: Callable[[str], str] = head_of
    name_key: str = "name"
    tail: str = "}"
    fence: str = ""
    only_known: bool = False

    def form(self, *signs: str) -> ToolFormat:
        """Return the format of models whose chat template has these signs."""
        marks = (self.begin, *([self.end] if self.end else []))
        return ToolFormat(signs, self.begin, marks, self._read, self.rules)

    def _read(self, tape: Tape, parts: Parts, tools: Tools) -> Steps[None]:
        def is_known(name: str) -> bool:
            return name in tools or not self.only_known

        while (yield from tape.pass_until((self.begin,), parts.add_text)):
            tape.keep()
            yield from tape.skip_space()
            if not (yield from tape.accept(self.fence)):
                parts.add_text(self.begin + tape.kept())
                continue
            yield from tape.skip_space()
            is_array, num_before = (yield from tape.accept("[")), parts.num_calls
            yield from tape.skip_space()
            while (yield from read_call(tape, parts, is_known, name_key=self.name_key)):
                yield from tape.pass_run(_BETWEEN, drop)
                tape.keep()
            if parts.num_calls == num_before:
                parts.add_text(self.begin + tape.kept())
                continue
            parts.add_text(tape.kept())
            if is_array and (yield from tape.accept("]")):
                yield from tape.skip_space()
            if self.end and (yield from tape.accept(self.end)):
                yield from tape.skip_space()

    def rules(self, calls: Calls, spell: Spell) -> str:
        """Return the rules of a ToolFormat."""
        call = calls.either(lambda name, arguments: f"{self.head(name)} {arguments} {literal(self.tail)}")
        before, after, between = (
            literal(text) if text else "" for text in (self.around[0], self.around[1], self.between)
        )
        end = spell(self.end) if self.end else ""
        return f"calls: {before} call {calls.repeated(between)} {after} {end}\ncall: {call}\n"


APRIEL = JsonList("<tool_calls>", "</tool_calls>").form("<tool_calls>[")
NEMOTRON_2 = JsonList("<TOOLCALL>", "</TOOLCALL>").form("<TOOLCALL>[")
GRANITE_3 = JsonList("<|tool_call|>", "").form("<|tool_call|>", "JSON list of tools")
