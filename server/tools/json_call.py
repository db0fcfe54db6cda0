"""Reads one call that is a JSON object with a name and arguments, as its text arrives.

The arguments are passed on as the model writes them; their JSON is not checked. But what a weak model writes is read,
too: control characters within strings are escaped, and arguments that are no object stay the JSON that they are. Most
formats call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Emit, Steps, Tape
from gptserve.weights.chat.arguments import ESCAPES

_NAME_CHARS = re.compile(r"[a-zA-Z0-9_.-]+")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "tool_call_id", "type")
_PLAIN = re.compile(r'[^"{}\[\]]+')
_CHARS = re.compile(r'[^"\\]+')
_WORD = re.compile(r"[^\s,:\"{}\[\]]+")
_SCALAR = re.compile(r"null|true|false|-?\d+(\.\d+)?([eE][+-]?\d+)?")
_DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}


def read_name(tape: Tape) -> Steps[str]:
    """Read the name of a tool; return "" if what comes is none."""
    name = yield from tape.take_run(_NAME_CHARS)
    return name if _NAME.fullmatch(name) else ""


def read_call(
    tape: Tape, parts: Parts, is_known: Callable[[str], bool] = lambda name: True, *, name_key: str = "name"
) -> Steps[bool]:
    """Read an object and begin a call with it; return whether it is one. Then the tape keeps nothing any more.

    Once the call has begun, a fault ends it.
    """
    call = _Call(tape, parts)
    if not (yield from tape.accept("{")):
        return False
    while True:
        key = yield from _read_text(tape)
        yield from tape.skip_space()
        if key is None or not (yield from tape.accept(":")):
            return call.has_begun
        if key == name_key and call.name is None:
            name = yield from _read_text(tape)
            if name is None or _NAME.fullmatch(name) is None or not is_known(name):
                return call.has_begun
            call.set_name(name)
        elif key in _ARGUMENTS and not call.has_arguments:
            if not (yield from call.read_arguments()):
                return call.has_begun
        elif key not in _OTHERS or (yield from _read_text(tape)) is None:
            return call.has_begun
        yield from tape.skip_space()
        if (yield from tape.accept("}")):
            return call.end()
        if not (yield from tape.accept(",")):
            return call.has_begun


def read_object(tape: Tape, emit: Emit) -> Steps[bool]:
    """Pass a JSON object or an array on, up to the bracket that closes it; return whether it came."""
    depth = 0
    while char := (yield from tape.peek()):
        if char == '"':
            yield from _pass_string(tape, emit)
        elif char in _DEPTHS:
            depth += _DEPTHS[char]
            emit(tape.read())
            if depth == 0:
                return True
        else:
            emit(tape.read_run(_PLAIN))
    return False


class _Call:
    """A call, which begins once its name and the first of its arguments are known."""

    def __init__(self, tape: Tape, parts: Parts) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.has_begun = False
        self._tape, self._parts = tape, parts
        self._early: list[str] = []

    def set_name(self, name: str) -> None:
        """Set the name, which may come after the arguments."""
        self.name = name
        if self.has_arguments:
            self._begin()

    def read_arguments(self) -> Steps[bool]:
        """Read a JSON value, or the text of an object; return whether it came. Null is an object without fields."""
        yield from self._tape.skip_space()
        char = yield from self._tape.peek()
        if char in ("{", "["):
            self._set_arguments()
            return (yield from read_object(self._tape, self._emit))
        written = yield from (self._read_string() if char == '"' else self._read_scalar())
        if written is not None:
            self._set_arguments()
            self._emit(written)
        return written is not None

    def _read_string(self) -> Steps[str | None]:
        text = yield from _read_text(self._tape)
        if text is None or text.lstrip().startswith("{"):
            return text
        return json.dumps(text, ensure_ascii=False) if text.strip() else "{}"

    def _read_scalar(self) -> Steps[str | None]:
        word = yield from self._tape.take_run(_WORD)
        return None if _SCALAR.fullmatch(word) is None else "{}" if word == "null" else word

    def end(self) -> bool:
        """End the object; return whether it is a call."""
        if self.name is not None and not self.has_arguments:
            self._set_arguments()
            self._emit("{}")
        return self.has_begun

    def _set_arguments(self) -> None:
        self.has_arguments = True
        if self.name is not None:
            self._begin()

    def _begin(self) -> None:
        assert self.name is not None
        self.has_begun = True
        self._parts.begin_call(self.name)
        self._parts.add_arguments("".join(self._early))
        self._tape.kept()

    def _emit(self, text: str) -> None:
        if self.has_begun:
            self._parts.add_arguments(text)
        else:
            self._early.append(text)


def _pass_string(tape: Tape, emit: Emit) -> Steps[None]:
    """Pass a JSON string on, with its quotes and with control characters escaped."""
    emit(tape.read())
    while char := (yield from tape.peek()):
        emit((tape.read_run(_CHARS) or tape.read()).translate(ESCAPES))
        if char == '"':
            return
        if char == "\\" and (yield from tape.peek()):
            escaped = tape.read()
            emit(ESCAPES[ord(escaped)][1:] if ord(escaped) in ESCAPES else escaped)


def _read_text(tape: Tape) -> Steps[str | None]:
    """Read white space and a JSON string; return its text, None if none comes."""
    yield from tape.skip_space()
    if (yield from tape.peek()) != '"':
        return None
    pieces: list[str] = []
    yield from _pass_string(tape, pieces.append)
    try:
        text = json.loads("".join(pieces), strict=False)
    except ValueError:
        return None
    return str(text).encode(errors="replace").decode()  # half a surrogate pair is no character
