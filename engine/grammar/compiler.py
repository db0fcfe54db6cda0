"""From a grammar to a matcher, by llguidance over the model's own tokens.

The engine compiles in a thread of its own, by `compiling.py`. Before that the server has compiled the same grammar in a
worker process (`open_checker`), whose limits hold where llguidance's do not. Torch-free; llguidance is imported with
the first tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gptserve.engine.errors import EngineError
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Matcher, reason_of
from gptserve.engine.grammar.schema.document import SchemaError
from gptserve.engine.grammar.schema.rewrite import rewrite
from gptserve.weights.families import load_config
from gptserve.weights.tokenizers.vocabulary import load_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,  # some 50 ms of one mask
    "step_max_items": 10_000,  # with the next one: an ambiguous grammar takes at most some 200 ms for a mask
    "max_items_in_row": 500,  # an object may have a hundred optional properties; time goes with the square of this
    "max_lexer_states": 10_000,  # at 1 to 2 KB, for each sequence
    "max_grammar_size": 100_000,
}
"""Of llguidance's defaults some let one mask take ten seconds."""

NUM_TRIED = 32  # tokens
_STRIDE = 7919  # a prime: each step takes another part of the vocabulary

# Without it llguidance forces the tokens that its tokenizer makes of a text that must come, and it would need one. A
# grammar may say so, too; the last one counts.
_EVERY_TOKEN = '\n%llguidance {"no_forcing": true}\n'
_DEFINITION = re.compile(r"json-schema:///#/\$defs/\d+")  # as the rewritten schema names it
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class GrammarError(EngineError):
    """A grammar cannot be compiled; the message is llguidance's reason."""


class Compiler:
    """Compiles grammars for the model of a folder. Raises WeightsError if it has no tokenizer, or a broken one."""

    def __init__(self, folder: Path) -> None:
        model = load_config(folder)
        self._eos_token_ids = model.eos_token_ids
        self._tokenizer = _open_tokens(folder, model.vocab_size, self._eos_token_ids)

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher that has seen no token. Raises GrammarError."""
        parse = partial(self._parse, grammar)
        rolls_back = grammar.kind != "lark"
        return Matcher(self.check(grammar), parse(), parse, self._tokenizer, self._eos_token_ids, rolls_back=rolls_back)

    def check(self, grammar: Grammar) -> LLMatcher:
        """Raise GrammarError unless a grammar compiles; return llguidance's matcher."""
        matcher = self._parse(grammar)
        probe = matcher.deep_copy()
        self._try_out(probe)
        if probe.is_error():
            reason = _DEFINITION.sub("a definition", reason_of(probe))
            raise GrammarError(reason if grammar.kind == "lark" or grammar.frame else _PLACE.sub("", reason))
        return matcher

    def _parse(self, grammar: Grammar) -> LLMatcher:
        """Return llguidance's matcher, which may have an error. Raises GrammarError."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = LLMatcher.grammar_from_lark(_to_lark(grammar) + _EVERY_TOKEN)
        except SchemaError as error:
            raise GrammarError(str(error)) from None
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))

    def _try_out(self, matcher: LLMatcher) -> None:
        """Follow the grammar for some tokens: all copies have the lexer that this one builds, or its fault.

        A mask over a vocabulary of 50,000 takes 30 ms where a string begins for the first time, then 0.1 ms.
        """
        for step in range(NUM_TRIED):
            if matcher.is_error():
                return
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            bits[list(self._eos_token_ids)] = 0
            allowed = bits.nonzero()[0]
            if len(allowed) == 0:
                break
            matcher.consume_token(int(allowed[step * _STRIDE % len(allowed)]))


def open_checker(folder: str) -> Callable[..., str]:
    """Be opened in a worker: return the function from the fields of a Grammar to the reason why it is none, or ""."""
    compiler = Compiler(Path(folder))

    def check(**fields: Any) -> str:
        try:
            compiler.check(Grammar(**fields))
        except GrammarError as error:
            return str(error)
        return ""

    return check


class _Tokens:
    """The model's tokens as LLTokenizer reads them: its attributes are those of llguidance's TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("no_forcing needs no tokenizer")


def _open_tokens(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the bytes of every token, and which are special: no text of a grammar matches these."""
    from llguidance import LLTokenizer

    vocabulary = load_vocabulary(folder)
    tokens = [vocabulary.token_bytes.get(token_id, b"") for token_id in range(vocab_size)]
    special = [token.token_id for token in vocabulary.added if token.special]
    wrapper: Any = _Tokens(tokens, special, eos_token_ids[0])
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _to_lark(grammar: Grammar) -> str:
    if grammar.frame:
        return f"{grammar.frame}\nframed: {_rule(grammar)}"
    return grammar.text if grammar.kind == "lark" else f"start: {_rule(grammar)}"


def _rule(grammar: Grammar) -> str:
    from llguidance import regex_to_lark

    match grammar.kind:
        case "json":
            return f"%json {_schema(grammar)}"
        case "regex":
            regex = regex_to_lark(grammar.text, use_ascii="dw")  # \d and \w as in JavaScript and in a JSON Schema
            return f"/{regex}/"
        case "choice":
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"


def _schema(grammar: Grammar) -> str:
    """Return the JSON Schema with the options for whitespace. It has a place for them unless it is true or false."""
    schema = rewrite(json.loads(grammar.text), grammar.unnamed_properties)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        of_whitespace = {"whitespace_pattern": grammar.whitespace} if grammar.whitespace else {}
        schema = {**schema, "x-guidance": {"whitespace_flexible": False, **of_whitespace}}
    return json.dumps(schema)
