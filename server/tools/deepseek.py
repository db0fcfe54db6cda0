"""DeepSeek. V3 and R1 write the arguments in a block of ```json, V3.1 as they are, from V3.2 on elements.

    <|tool▁calls▁begin|><|tool▁call▁begin|>name<|tool▁sep|>{…}<|tool▁call▁end|><|tool▁calls▁end|>

The bars of its marks are full-width ones.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.server.tools.elements import Elements
from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.json_call import read_name, read_object
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.sections import Marks, read_sections
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.values import Tools

BAR = "\uff5c"
BEGIN, END = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
CALL, CALL_END, SEPARATOR = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>", f"<{BAR}tool▁sep{BAR}>"
_OPEN, _CLOSE = "\n```json\n", "\n```"
_MARKS = BEGIN, END, CALL, CALL_END, SEPARATOR


def _read(tape: Tape, parts: Parts, _tools: Tools) -> Steps[None]:
    yield from read_sections(tape, parts, Marks(BEGIN, END, CALL, CALL_END), _read_call)


def _read_call(tape: Tape, parts: Parts) -> Steps[bool]:
    """Read a call up to the end of its arguments; return whether that came."""
    name = yield from read_name(tape)
    if not (yield from tape.accept(SEPARATOR)):
        return False
    yield from tape.skip_space()
    if (yield from tape.peek()) != "{":  # what came was the type of the call
        name = yield from read_name(tape)
        yield from tape.skip_space()
        yield from tape.accept(_OPEN.strip())
        yield from tape.skip_space()
    if not name or (yield from tape.peek()) != "{":
        return False
    tape.kept()
    parts.begin_call(name)
    return (yield from read_object(tape, parts.add_arguments))


def _block_rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        head = f'{spell(CALL)} "function" {spell(SEPARATOR)} {literal(name + _OPEN)}'
        return f"{head} {arguments} {literal(_CLOSE)} {spell(CALL_END)}"

    rest = calls.repeated(literal("\n"))
    return f"calls: call {rest} {spell(END)}\ncall: {calls.either(call)}\n"


def _plain_rules(calls: Calls, spell: Spell) -> str:
    def call(name: str, arguments: str) -> str:
        return f"{spell(CALL)} {literal(name)} {spell(SEPARATOR)} {arguments} {spell(CALL_END)}"

    return f"calls: call {calls.repeated('')} {spell(END)}\ncall: {calls.either(call)}\n"


DEEPSEEK_V3 = ToolFormat(signs=(BEGIN, "```json"), begin=BEGIN, marks=_MARKS, read=_read, rules=_block_rules)
DEEPSEEK_V3_1 = ToolFormat(signs=(BEGIN,), begin=BEGIN, marks=_MARKS, read=_read, rules=_plain_rules)

_DSML = f"{BAR}DSML{BAR}"
_ELEMENTS = Elements(
    begin=f"<{_DSML}function_calls>",
    end=f"</{_DSML}function_calls>",
    function=(f'<{_DSML}invoke name="', '">'),
    function_end=f"</{_DSML}invoke>",
    parameter=f'<{_DSML}parameter name="',
    text='" string="true">',
    json='" string="false">',
    value_end=f"</{_DSML}parameter>",
    has_own_marks=False,
)
DEEPSEEK_V3_2 = _ELEMENTS.form(_DSML, "function_calls>")
DEEPSEEK_V4 = replace(_ELEMENTS, begin=f"<{_DSML}tool_calls>", end=f"</{_DSML}tool_calls>").form(_DSML, "tool_calls>")
