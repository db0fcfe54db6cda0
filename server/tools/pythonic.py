"""Calls as Python writes them: [get_weather(city="Oslo", days=2), get_time()].

Llama 4 and others begin an answer with them; LFM2 has marks around the list, and OLMo 3 has them around lines without
a list. Values are literals of Python; those that a grammar forces are JSON, which literals of Python resemble.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_name
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.python_literal import read_literal
from gptserve.server.tools.tape import SPACE, Steps, Tape, drop
from gptserve.server.tools.value_rules import other_names, shape_of
from gptserve.server.tools.values import ArgumentWriter, Tools

_KEY_CHARS = re.compile(r"[\w.-]+")
_START, _END = "<|python_start|>", "<|python_end|>"


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is around calls: `begin` and `end`, and brackets where calls are a list, with `between` in it."""

    begin: str = ""
    end: str = ""
    brackets: tuple[str, str] = ("[", "]")
    between: str = ", "

    def form(self, *signs: str) -> ToolFormat:
        return ToolFormat(
            signs=signs,
            begin=self.begin,
            marks=(self.begin, self.end) if self.begin else (_START, _END),
            read=self._read,
            rules=self._rules,
            arguments=_argument_rules,
            opening=r"\[",
        )

    def _read(self, tape: Tape, parts: Parts, tools: Tools) -> Steps[None]:
        if not self.begin:
            tape.keep()
            yield from tape.pass_run(SPACE, drop)
            yield from tape.accept(_START)
            if not (yield from self._read_list(tape, parts, tools)):
                parts.add_text(tape.kept())
            yield from tape.accept(_END)
            yield from tape.pass_until((), parts.add_text)
        while self.begin and (yield from tape.pass_until((self.begin,), parts.add_text)):
            tape.keep()
            if not (yield from self._read_list(tape, parts, tools)):
                parts.add_text(self.begin + tape.kept())
            elif (yield from tape.accept(self.end)):
                yield from tape.skip_space()

    def _read_list(self, tape: Tape, parts: Parts, tools: Tools) -> Steps[bool]:
        """Read calls and the brackets around them; return whether the first is a call. A fault ends it."""
        opener, closer = self.brackets
        num_calls = 0
        yield from tape.skip_space()
        if not (yield from tape.accept(opener)):
            return False
        while True:
            yield from tape.skip_space()
            if (closer or self.end) and (yield from tape.sees(closer or self.end)):
                break
            if num_calls:
                tape.keep()
            if not (yield from _read_call(tape, parts, tools)):
                if num_calls:
                    parts.add_text(tape.kept())
                return num_calls > 0
            num_calls += 1
            yield from tape.skip_space()
            if not (yield from tape.accept(self.between.strip())):
                break
        if num_calls and closer:
            yield from tape.accept(closer)
            yield from tape.skip_space()
        return num_calls > 0

    def _rules(self, calls: Calls, spell: Spell) -> str:
        call = calls.either(lambda name, arguments: f"{literal(name + '(')} {arguments} {literal(')')}")
        opener, closer = (literal(bracket) if bracket else "" for bracket in self.brackets)
        end = spell(self.end) if self.end else ""
        line = "" if self.between.strip() else literal(self.between)
        rest = calls.repeated(literal(self.between))
        return f"calls: {opener} {line} call {rest} {line} {closer} {end}\ncall: {call}\n"


def _read_call(tape: Tape, parts: Parts, tools: Tools) -> Steps[bool]:
    """Read a call of a known tool; return whether it came whole. One that begins otherwise than a call is none."""
    name = yield from read_name(tape)
    if name not in tools or not (yield from tape.accept("(")):
        return False
    key = yield from _read_key(tape)
    if key is None and not (yield from tape.sees(")")):
        return False
    tape.kept()
    parts.begin_call(name)
    writer = ArgumentWriter(parts, {})
    while key is not None:
        writer.key(key)
        yield from tape.skip_space()
        if not (yield from read_literal(tape, writer.value)):
            return False
        yield from tape.skip_space()
        if not (yield from tape.accept(",")):
            break
        key = yield from _read_key(tape)
    if not (yield from tape.accept(")")):
        return False
    writer.end()
    return True


def _read_key(tape: Tape) -> Steps[str | None]:
    """Read the name of an argument and the sign after it; None if none comes."""
    yield from tape.skip_space()
    key = yield from tape.take_run(_KEY_CHARS)
    yield from tape.skip_space()
    return key if key and (yield from tape.accept("=")) else None


def _argument_rules(arguments: Arguments, _spell: Spell) -> Iterator[str]:
    return listed_rules(arguments, "=", ", ", ("True", "False", "true", "false"))


def listed_rules(arguments: Arguments, sign: str, between: str, booleans: Iterable[str]) -> Iterator[str]:
    """Yield a rule for the arguments from each on: first, and after another with what is between. Raises SchemaError.

    `sign` stands before their values, which are JSON, or `booleans`.
    """
    shape = shape_of(arguments.schema)
    rule, comma, count = arguments.rule, literal(between), len(shape.named)
    either = f"({' | '.join(map(literal, booleans))})"
    for i, (name, schema) in enumerate(shape.named.items()):
        value = either if shape.is_boolean(schema) else f"{rule}_{i}_value"
        yield f"{rule}_{i}: {literal(f'{name}{sign}')} {value}"
        if value.endswith("_value"):
            yield shape.json_rule(value, schema, arguments.options)
        skipped = ("", "") if name in shape.required else (f" | {rule}_from_{i + 1}", f" | {rule}_more_{i + 1}")
        yield f"{rule}_from_{i}: {rule}_{i} {rule}_more_{i + 1}{skipped[0]}"
        yield f"{rule}_more_{i}: {comma} {rule}_{i} {rule}_more_{i + 1}{skipped[1]}"
    if shape.others is False:
        yield f'{rule}_from_{count}: ""'
        yield f'{rule}_more_{count}: ""'
    else:
        yield f"{rule}_from_{count}: ({rule}_other ({comma} {rule}_other)*)?"
        yield f"{rule}_more_{count}: ({comma} {rule}_other)*"
        yield f"{rule}_other: {rule.upper()}_OTHER {literal(sign)} {rule}_value"
        yield f"{rule.upper()}_OTHER: {other_names(shape)}"
        yield shape.json_rule(f"{rule}_value", shape.others, arguments.options)
    yield f"{rule}: {rule}_from_0"


PYTHONIC = _Frame().form("[func_name1(params_name1=params_value1")
LFM = _Frame("<|tool_call_start|>", "<|tool_call_end|>").form("List of tools: ")
OLMO = _Frame("<function_calls>", "</function_calls>", ("", ""), "\n").form("<function_calls>")
