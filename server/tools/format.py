"""ToolFormat: how a family of models writes calls of tools in the text of its answers. One file has one format.

A format reads calls from a tape and has the grammar of one answer. `formats.py` lists the formats, `dialect.py` chooses
one, `grammar.py` joins the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gptserve.engine.grammar.schema.document import Node
from gptserve.server.tools.parts import Parts
from gptserve.server.tools.tape import Steps, Tape
from gptserve.server.tools.values import Kinds, Tools

Spell = Callable[[str], str]
"""From a mark to its symbol in Lark: a special token, or a text."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that a grammar allows. Rule number i of the arguments is `arguments_i`, for the i-th of the names.

    `whitespace` is a regex of what stands between the tokens of JSON that may come instead; None if none may.
    """

    names: Sequence[str]
    is_single: bool
    whitespace: str | None

    def either(self, rule: Callable[[str, str], str]) -> str:
        """Return an alternative for each name, by its name and its rule of arguments."""
        return " | ".join(rule(name, f"arguments_{i}") for i, name in enumerate(self.names))

    def repeated(self, between: str) -> str:
        """Return what follows a first call: more calls with something between them, unless only one is allowed."""
        return "" if self.is_single else f"({between} call)*"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one tool, for a format that does not write them as JSON.

    `rule` is the name of their rule in Lark; names of other rules begin with it. What follows `schema`, a JSON Schema
    that `rewrite` has made, is allowed. `kinds` tell how `read` takes the values. `options` are the x-guidance of JSON.
    """

    rule: str
    schema: Node
    kinds: Kinds
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models write calls.

    A chat template that has all `signs` makes them do so. `begin` is the mark before the calls, "" if they begin the
    answer, with `opening`, a regex. `marks` are texts that `read` needs, also where they are special tokens. `read`
    reads an answer, given the tools. `rules` returns rules of Lark; of these `calls` is what follows `begin`.
    `arguments` returns the rules of arguments that are no JSON, a rule a line, or raises SchemaError; None if they are
    JSON.
    """

    signs: tuple[str, ...]
    begin: str
    marks: tuple[str, ...]
    read: Callable[[Tape, Parts, Tools], Steps[None]]
    rules: Callable[[Calls, Spell], str]
    arguments: Callable[[Arguments, Spell], Iterable[str]] | None = None
    opening: str = r"\{"


def literal(text: str) -> str:
    """Return a text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Return a regex in Lark."""
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL) + "/"
