"""Llama 3.x: the answer is {"name": …, "parameters": …}, perhaps after <|python_tag|>; more calls follow after "; ".

Llama 4 may put its marks of Python before it.
"""

from __future__ import annotations

import re

from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal, regex
from gptserve.server.tools.json_call import read_call
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import SPACE, Steps, Tape, drop
from gptserve.server.tools.values import Tools

TAG = "<|python_tag|>"
START, END = "<|python_start|>", "<|python_end|>"
_BETWEEN = re.compile(r"[; \t\r\n]+")


def _read(tape: Tape, parts: Parts, tools: Tools) -> Steps[None]:
    """Read calls of known names; an answer in JSON may look like another one."""
    is_call = True
    while is_call:
        tape.keep()
        yield from tape.pass_run(SPACE, drop)
        for mark in (TAG, START, END):
            yield from tape.accept(mark)
            yield from tape.skip_space()
        is_call = yield from read_call(tape, parts, tools.__contains__)
        if is_call:
            yield from tape.pass_run(_BETWEEN, drop)
            if (yield from tape.accept(END)):
                yield from tape.skip_space()
    parts.add_text(tape.kept())
    yield from tape.pass_until((), parts.add_text)


def _rules(calls: Calls, _spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        if calls.whitespace is None:
            head = literal(f'{{"name": "{name}", "parameters": ')
            return f"{head} {arguments} {literal('}')}"
        # Other JSON is told from a call token by token: a longer text would rule out all that only begins like it.
        tokens = ("{", '"name"', ":", f'"{name}"', ",", '"parameters"', ":")
        gap = f" {regex(calls.whitespace)} " if calls.whitespace else " "
        return gap.join((*map(literal, tokens), arguments, literal("}")))

    return f"calls: call {calls.repeated(literal('; '))}\ncall: {calls.either(call)}\n"


LLAMA = ToolFormat(signs=('"parameters": dictionary',), begin="", marks=(TAG, START, END), read=_read, rules=_rules)
