"""The grammar of a completion, as it crosses between processes: text, never compiled.

Torch-free and without llguidance, so that the server can make one. `compiler.py` compiles it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gptserve.engine.errors import InvalidRequestError

GrammarKind = Literal["json", "regex", "choice", "lark"]
UnnamedProperties = Literal["allow", "refuse"]
"""Whether a JSON Schema that names properties, and says nothing of others, allows others."""

MAX_GRAMMAR_LENGTH = 2**16  # characters; every request with it carries it, and it is compiled more than once
ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]*"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion has to match from its first token to its end of text.

    - json: `text` is a JSON Schema. `whitespace` is a regex of what stands between the tokens of JSON; none if empty.
    - regex: the whole completion matches `text`.
    - choice: `text` is a JSON list of strings, and the completion is one of them.
    - lark: `text` is a grammar in llguidance's dialect of Lark.

    As JSON Schema has it, a schema allows properties that it does not name; with unnamed_properties "refuse" only where
    it names none or says so.

    With a `frame` all this is only a part of the completion: the frame has rules in Lark, and `framed` stands for it.
    """

    kind: GrammarKind
    text: str
    whitespace: str = ""
    frame: str = ""
    unnamed_properties: UnnamedProperties = "allow"

    def __post_init__(self) -> None:
        for name, text in (("grammar", self.text), ("whitespace", self.whitespace), ("frame", self.frame)):
            if len(text) > MAX_GRAMMAR_LENGTH:
                message = f"{name} may have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}"
                raise InvalidRequestError(message, param="grammar")
