"""Calls as Python writes them: [get_weather(city="Oslo", days=2), get_time()].

Llama 4 and others begin an answer with them; LFM2 has marks around the list, and OLMo 3 has them around lines without
a list. Values are literals of Python; those that a grammar forces are JSON, which literals of Python resemble.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import NAME
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.python_literal import read_literal
from gptserve.server.tools.tape import SPACE, Steps, Tape, drop
from gptserve.server.tools.value_rules import Shape, other_names, shape_of
from gptserve.server.tools.values import ArgumentWriter, Tools

_NAME_CHARS = re.compile(r"[a-zA-Z0-9_.-]+")
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
            read=partial(_read, frame=self),
            rules=partial(_rules, frame=self),
            arguments=_argument_rules,
            opening=r"\[",
        )


def _read(tape: Tape, parts: Parts, tools: Tools, *, frame: _Frame) -> Steps[None]:
    if not frame.begin:
        tape.keep()
        yield from tape.pass_run(SPACE, drop)
        yield from tape.accept(_START)
        if not (yield from _read_list(tape, parts, tools, frame)):
            parts.add_text(tape.kept())
        yield from tape.accept(_END)
        yield from tape.pass_until((), parts.add_text)
    while frame.begin and (yield from tape.pass_until((frame.begin,), parts.add_text)):
        tape.keep()
        if not (yield from _read_list(tape, parts, tools, frame)):
            parts.add_text(frame.begin + tape.kept())
        elif (yield from tape.accept(frame.end)):
            yield from tape.skip_space()


def _read_list(tape: Tape, parts: Parts, tools: Tools, frame: _Frame) -> Steps[bool]:
    """Read calls and the brackets around them; return whether the first is a call. A fault ends it."""
    opener, closer = frame.brackets
    num_calls = 0
    yield from tape.skip_space()
    if opener and not (yield from tape.accept(opener)):
        return False
    while True:
        yield from tape.skip_space()
        if (closer or frame.end) and (yield from tape.sees(closer or frame.end)):
            break
        if num_calls:
            tape.keep()
        if not (yield from _read_call(tape, parts, tools)):
            if num_calls:
                parts.add_text(tape.kept())
            return num_calls > 0
        num_calls += 1
        yield from tape.skip_space()
        if not ((yield from tape.accept(frame.between.strip())) or not frame.between.strip()):
            break
    if num_calls and closer:
        yield from tape.accept(closer)
        yield from tape.skip_space()
    return num_calls > 0


def _read_call(tape: Tape, parts: Parts, tools: Tools) -> Steps[bool]:
    """Read a call of a known tool; return whether it came whole. One that begins otherwise than a call is none."""
    pieces: list[str] = []
    yield from tape.pass_run(_NAME_CHARS, pieces.append)
    name = "".join(pieces)
    if NAME.fullmatch(name) is None or name not in tools or not (yield from tape.accept("(")):
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
    pieces: list[str] = []
    yield from tape.skip_space()
    yield from tape.pass_run(_KEY_CHARS, pieces.append)
    yield from tape.skip_space()
    return "".join(pieces) if pieces and (yield from tape.accept("=")) else None


def _rules(calls: Calls, spell: Spell, *, frame: _Frame) -> str:
    call = calls.either(lambda name, arguments: f"{literal(name + '(')} {arguments} {literal(')')}")
    opener, closer = (literal(bracket) if bracket else "" for bracket in frame.brackets)
    end = spell(frame.end) if frame.end else ""
    line = "" if frame.between.strip() else literal(frame.between)
    rest = calls.repeated(literal(frame.between))
    return f"calls: {opener} {line} call {rest} {line} {closer} {end}\ncall: {call}\n"


def _argument_rules(arguments: Arguments, _spell: Spell) -> Sequence[str]:
    return list(_rules_of(arguments, shape_of(arguments.schema)))


def _rules_of(arguments: Arguments, shape: Shape) -> Iterator[str]:
    """Yield a rule for the arguments from each on: first, and after another with a comma."""
    rule, comma, count = arguments.rule, literal(", "), len(shape.named)
    for i, (name, schema) in enumerate(shape.named.items()):
        value = '("True" | "False" | "true" | "false")' if shape.is_boolean(schema) else f"{rule}_{i}_value"
        yield f"{rule}_{i}: {literal(f'{name}=')} {value}"
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
        yield f"{rule}_other: {rule.upper()}_OTHER {literal('=')} {rule}_value"
        yield f"{rule.upper()}_OTHER: {other_names(shape)}"
        yield shape.json_rule(f"{rule}_value", shape.others, arguments.options)
    yield f"{rule}: {rule}_from_0"


PYTHONIC = _Frame().form("[func_name1(params_name1=params_value1")
LFM = _Frame("<|tool_call_start|>", "<|tool_call_end|>").form("List of tools: ")
OLMO = _Frame("<function_calls>", "</function_calls>", ("", ""), "\n").form("<function_calls>")
