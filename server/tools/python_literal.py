"""Reads a literal of Python as it arrives and passes its JSON on: pythonic calls have such values.

It takes JSON's spelling of true, false and null, too. Nothing is evaluated. `values.py` and `pythonic.py` call it.
"""

from __future__ import annotations

import json
import re

from gptserve.server.tools.tape import Emit, Steps, Tape

_MAX_DEPTH = 64
_WORD = re.compile(r"[a-zA-Z]+")
_NUMBER = re.compile(r"[-+0-9.eE_]+")
_NUMBER_AS_JSON = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CHARS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""},
    **{"\\": "\\", "'": "'", '"': '"', "/": "/"},
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def read_literal(tape: Tape, emit: Emit, depth: int = _MAX_DEPTH) -> Steps[bool]:
    """Pass the JSON of a value on; return whether it came whole. A tuple is an array."""
    char = yield from tape.peek()
    if char in ("'", '"'):
        return (yield from _read_string(tape, emit))
    if char in _CLOSERS:
        return depth > 0 and (yield from _read_container(tape, emit, depth - 1))
    written = yield from tape.take_run(_WORD if char.isalpha() else _NUMBER)
    found = _WORDS.get(written) if char.isalpha() else _number_as_json(written)
    if found is not None:
        emit(found)
    return found is not None


def literal_as_json(text: str) -> str | None:
    """Return the JSON of a text that is one literal; None for another."""
    tape, pieces = Tape(), list[str]()
    tape.feed(text, is_last=True)
    steps = _read_whole(tape, pieces)
    try:
        next(steps)
    except StopIteration as end:
        return "".join(pieces) if end.value else None
    raise AssertionError("nothing more can arrive")


def _read_whole(tape: Tape, pieces: list[str]) -> Steps[bool]:
    is_literal = yield from read_literal(tape, pieces.append)
    yield from tape.skip_space()
    return is_literal and not (yield from tape.peek())


def _number_as_json(written: str) -> str | None:
    """Return a number of Python in JSON: without underscores and a plus, with digits around the point."""
    written = written.replace("_", "").removeprefix("+")
    written = re.sub(r"\.(?![0-9])", ".0", re.sub(r"(?<![0-9])\.", "0.", written))
    return written if _NUMBER_AS_JSON.fullmatch(written) else None


def _read_container(tape: Tape, emit: Emit, depth: int) -> Steps[bool]:
    opener = tape.read()
    closer, is_dict = _CLOSERS[opener], opener == "{"
    emit("{" if is_dict else "[")
    is_first = True
    while True:
        yield from tape.skip_space()
        if (yield from tape.accept(closer)):
            emit("}" if is_dict else "]")
            return True
        if not is_first:
            if not (yield from tape.accept(",")):
                return False
            yield from tape.skip_space()
            if (yield from tape.accept(closer)):
                emit("}" if is_dict else "]")
                return True
            emit(", ")
        is_first = False
        if is_dict:
            if (yield from tape.peek()) not in _CHARS or not (yield from _read_string(tape, emit)):
                return False
            yield from tape.skip_space()
            if not (yield from tape.accept(":")):
                return False
            emit(": ")
            yield from tape.skip_space()
        if not (yield from read_literal(tape, emit, depth)):
            return False


def _read_string(tape: Tape, emit: Emit) -> Steps[bool]:
    quote = tape.read()
    emit('"')
    while char := (yield from tape.peek()):
        if char == quote:
            tape.read()
            emit('"')
            return True
        if char == "\\":
            tape.read()
            emit((yield from _read_escape(tape)))
        else:
            emit(_in_json(tape.read_run(_CHARS[quote])))
    return False


def _read_escape(tape: Tape) -> Steps[str]:
    """Read an escape after its backslash and return that of JSON."""
    char = yield from tape.peek()
    if not char:
        return ""
    tape.read()
    if char not in _HEX_ESCAPES:
        return _in_json(_ESCAPES.get(char, "\\" + char))
    digits = ""
    while len(digits) < _HEX_ESCAPES[char] and (next_one := (yield from tape.peek())) in _HEX_DIGITS and next_one:
        digits += tape.read()
    code = int(digits, 16) if len(digits) == _HEX_ESCAPES[char] else 2**32
    if code >= 0x110000:
        return _in_json("\\" + char + digits)
    return f"\\u{code:04x}" if code < 0x10000 else _in_json(chr(code))  # half a surrogate pair stays escaped


_HEX_DIGITS = "0123456789abcdefABCDEF"


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
