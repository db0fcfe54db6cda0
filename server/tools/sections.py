"""Reads sections of calls: text, the mark of a section, calls between marks of their own, the mark of its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape, drop


class Marks(NamedTuple):
    """The marks of a section and of a call in it."""

    begin: str
    end: str
    call: str
    call_end: str


ReadCall = Callable[[Tape, Parts], Steps[bool]]


def read_sections(tape: Tape, parts: Parts, marks: Marks, read_call: ReadCall) -> Steps[None]:
    """Read to the end. `read_call` reads what stands between the marks of a call and returns whether it is whole.

    A section without one call is text.
    """
    while (yield from tape.pass_until((marks.begin,), parts.add_text)):
        tape.keep()
        yield from tape.skip_space()
        num_before = parts.num_calls
        while (yield from tape.accept(marks.call)) and (yield from read_call(tape, parts)):
            if (yield from tape.pass_until((marks.call_end, marks.call, marks.end), drop)) != marks.call_end:
                break
            yield from tape.skip_space()
        if parts.num_calls == num_before:
            parts.add_text(marks.begin + tape.kept())
        elif (yield from tape.accept(marks.end)):
            yield from tape.skip_space()
