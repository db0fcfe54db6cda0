"""The grammar of an answer that must call tools, or that may and then has to keep to their schemas."""

from __future__ import annotations

import json

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import MAX_GRAMMAR_LENGTH, Grammar
from gptserve.server.completions.service import Tokenizer
from gptserve.server.tools import reasoning
from gptserve.server.tools.format import Calls, Spell, ToolFormat, literal
from gptserve.server.tools.request import AskedTools

# Models are trained on JSON with a space after a comma and a colon, and on JSON without.
_JSON_OPTIONS = {"whitespace_flexible": False, "whitespace_pattern": " ?"}


def spelling(tokenizer: Tokenizer) -> Spell:
    """Return the function from a mark to its symbol: texts do not match special tokens."""

    def spell(mark: str) -> str:
        ids = tokenizer.encode_with_special(mark)
        return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in tokenizer.special_ids else literal(mark)

    return spell


def text_grammar(asked: AskedTools, form: ToolFormat, spell: Spell, *, thinks: bool, is_open: bool) -> Grammar:
    """Return the grammar of an answer in a format. Raises InvalidRequestError.

    An answer of a model that `thinks` may begin with reasoning; where the prompt has opened that, it has to.
    """
    calls = f"{spell(form.begin)} calls" if form.begin else "calls"
    thought = "thought " if is_open else "thought? " if thinks else ""
    excluded = [*([] if form.begin else [r"\s*\{"]), *([rf"\s*{reasoning.BEGIN}"] if thinks and not is_open else [])]
    rules = [
        f"start: {thought}answer",
        "answer: calls_of_answer" if asked.must_call else "answer: TEXT | free_calls",
        f"calls_of_answer: {calls}",
        _free_calls(form, spell),
        "ANY: /(?s:.*)/",
        "TEXT: ANY" + "".join(f" & ~/{begin}(?s:.*)/" for begin in excluded),
        form.rules(Calls([function.name for function in asked.functions], asked.is_single), spell),
        _thought(spell, is_open=is_open),
    ]
    return _join(rules, asked)


def harmony_grammar(asked: AskedTools, spell: Spell) -> Grammar:
    """Return the grammar of an answer in harmony's channels, after <|start|>assistant. Raises InvalidRequestError."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
    start, channel, message, end, constrain = map(spell, marks)

    def call(name: str, arguments: str) -> str:
        return f'{literal(f"commentary to=functions.{name} ")} {constrain} "json" {message} {arguments}'

    calls = Calls([function.name for function in asked.functions], is_single=True)
    rules = [
        f'start: ({channel} /analysis|commentary/ {message} TEXT {end} {start} "assistant")* last',
        "last: call" if asked.must_call else f"last: call | {channel} /analysis|commentary|final/ {message} TEXT",
        f"call: {channel} ({calls.either(call)})",
        "TEXT: /(?s:.*)/",
    ]
    return _join(rules, asked)


def _free_calls(form: ToolFormat, spell: Spell) -> str:
    """Return the rule of calls that a text may come before."""
    if not form.begin:
        return "free_calls: calls"
    begin = spell(form.begin)
    # A begin in quotes could be a part of the text: the rule is lazy, so that the first one ends the text.
    return f"free_calls: before calls\nbefore{'[lazy]' if begin.startswith(chr(34)) else ''}: TEXT {begin}"


def _thought(spell: Spell, *, is_open: bool) -> str:
    """Return the rules of a reasoning and of the white space after it."""
    begin, end = spell(reasoning.BEGIN), spell(reasoning.END)
    opened = "" if is_open else rf"/\s*/ {begin} "
    return f"thought: marked /\\s{{0,2}}/\nmarked{'[lazy]' if end.startswith(chr(34)) else ''}: {opened}ANY {end}"


def _join(rules: list[str], asked: AskedTools) -> Grammar:
    """Return the grammar of rules and of the arguments that they name."""
    schemas = [{**asked.schema_of(function), "x-guidance": _JSON_OPTIONS} for function in asked.functions]
    text = "\n".join([*rules, *(f"arguments_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas))])
    if len(text) > MAX_GRAMMAR_LENGTH:
        message = f"tools may make a grammar of at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}"
        raise InvalidRequestError(message, param="tools")
    return Grammar("lark", text)
