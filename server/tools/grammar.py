"""The grammar of a chat's answer: reasoning, then calls of tools or a text, which may have to match another grammar.

`dialect.py` calls it for answers that must call tools, that may and then have to keep to their schemas, and for those
that are to match a grammar of the client and begin with reasoning or may be calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import MAX_GRAMMAR_LENGTH, Grammar, UnnamedProperties
from gptserve.engine.grammar.schema.document import SchemaError
from gptserve.engine.grammar.schema.effort import Effort
from gptserve.engine.grammar.schema.rewrite import rewrite
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.tools.format import Arguments, Calls, Spell, ToolFormat, literal
from gptserve.server.tools.reasoning import ThinkMarks
from gptserve.server.tools.request import AskedTools
from gptserve.server.tools.values import kinds_of

# Models are trained on JSON with a space after a comma and a colon, and on JSON without.
_WHITESPACE = " ?"
MAX_LIMIT = 2**20
"""No reasoning is longer."""
_ARGUMENTS = re.compile(r"arguments_(\d+)", re.IGNORECASE)
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)", re.DOTALL)


class Thinking(NamedTuple):
    """What stands between the marks of reasoning: a symbol, and the rules of it."""

    symbol: str
    rules: tuple[str, ...] = ()


FREE = Thinking("ANY")


def at_most(limit: int, tokenizer: Tokenizer, end: str) -> Thinking:
    """Return up to `limit` tokens, none of them special or the mark `end`, which is a token.

    So `end` may come at any time, and after so many tokens nothing else may. llguidance's own max_tokens would not let
    drafts be taken back.
    """
    if limit == 0:
        return Thinking("")
    excluded = sorted({*tokenizer.special_ids, *tokenizer.encode_with_special(end)})
    other = f"<[^{','.join(map(str, excluded))}]>"
    return Thinking("thinking", (f"thinking: other{{0,{min(limit, MAX_LIMIT)}}}", f"other: {other}"))


def spelling(tokenizer: Tokenizer, *, as_tokens: Collection[str] = ()) -> Spell:
    """Return the function from a mark to its symbol: texts do not match special tokens.

    Marks of as_tokens, each one token, are tokens even if they are not special: then no text matches them, either.
    """

    def spell(mark: str) -> str:
        ids = tokenizer.encode_with_special(mark)
        is_token = len(ids) == 1 and (ids[0] in tokenizer.special_ids or mark in as_tokens)
        return f"<[{ids[0]}]>" if is_token else literal(mark)

    return spell


def text_grammar(
    asked: AskedTools,
    form: ToolFormat,
    spell: Spell,
    unnamed: UnnamedProperties,
    *,
    think: ThinkMarks | None,
    is_open: bool,
    wanted: Grammar | None = None,
    thinking: Thinking = FREE,
) -> Grammar:
    """Return the grammar of an answer in a format. Raises InvalidRequestError.

    An answer may begin with reasoning, `thinking` between the marks `think`; where the prompt has opened that, it has
    to. A text matches `wanted`, and then calls have none before them.
    """
    calls = f"{spell(form.begin)} calls" if form.begin else "calls"
    thought = [rf"\s*{re.escape(think.begin)}"] if think is not None and not is_open else []
    excluded = [*([] if form.begin else [rf"\s*{form.opening}"]), *thought]
    # In a format without a begin both are JSON, which is told apart token by token: they need the same white space.
    whitespace = None if wanted is None or form.begin else wanted.whitespace
    names = [function.name for function in asked.functions]
    if asked.must_call:
        answer = "calls_of_answer"
    elif wanted is not None:
        answer = "framed | calls_of_answer"
    else:
        answer = "TEXT | free_calls"
    rules = [
        _start(spell, think, is_open=is_open, thinking=thinking),
        f"answer: {answer}",
        f"calls_of_answer: {calls}",
        _free_calls(form, spell),
        "TEXT: ANY" + "".join(f" & ~/{begin}(?s:.*)/" for begin in excluded),
        form.rules(Calls(names, asked.is_single, whitespace), spell),
        _arguments(asked, unnamed, _WHITESPACE if whitespace is None else whitespace, form, spell),
    ]
    return _join(rules, wanted)


def thinking_grammar(
    wanted: Grammar | None, spell: Spell, think: ThinkMarks, *, is_open: bool, thinking: Thinking = FREE
) -> Grammar:
    """Return the grammar of an answer without tools that begins with reasoning, as in `text_grammar`."""
    answer = "ANY" if wanted is None else "framed"
    return _join([_start(spell, think, is_open=is_open, thinking=thinking), f"answer: {answer}"], wanted)


def harmony_grammar(
    asked: AskedTools | None, spell: Spell, unnamed: UnnamedProperties, wanted: Grammar | None = None
) -> Grammar:
    """Return the grammar of an answer in harmony's channels, after <|start|>assistant. Raises InvalidRequestError.

    The last message is a call or the text, which matches `wanted`; then all others are reasoning, as those to the user
    are part of the text.
    """
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
    start, channel, message, end, constrain = map(spell, marks)

    def call(name: str, arguments: str) -> str:
        return f'{literal(f"commentary to=functions.{name} ")} {constrain} "json" {message} {arguments}'

    before = "/analysis|commentary/" if wanted is None else '"analysis"'
    text = "/analysis|commentary|final/ {} TEXT" if wanted is None else '"final" {} framed'
    last = [f"{channel} {text.format(message)}"] if asked is None or not asked.must_call else []
    rules = [
        f'start: ({channel} {before} {message} TEXT {end} {start} "assistant")* last',
        "TEXT: /(?s:.*)/",
    ]
    if asked is not None:
        last.append("call")
        calls = Calls([function.name for function in asked.functions], is_single=True, whitespace=None)
        rules += [f"call: {channel} ({calls.either(call)})", _arguments(asked, unnamed, _WHITESPACE)]
    return _join([*rules, f"last: {' | '.join(last)}"], wanted)


def fault_of_function(message: str, grammar: Grammar, asked: AskedTools) -> str | None:
    """Return why a grammar of calls does not compile, by the name of the function; None if none is at fault."""
    found = _PLACE.search(message)
    if found is None:
        return None
    rules = [rule.partition(":")[0] for rule in (grammar.frame or grammar.text).splitlines()]
    rule = rules[line] if (line := int(found[1]) - 1) < len(rules) else ""  # after the frame comes the client's grammar
    place = _ARGUMENTS.match(rule)
    return None if place is None else _fault(asked.functions[int(place[1])].name, found[2])


def _free_calls(form: ToolFormat, spell: Spell) -> str:
    """Return the rule of calls that a text may come before."""
    if not form.begin:
        return "free_calls: calls"
    begin = spell(form.begin)
    # A begin in quotes could be a part of the text: the rule is lazy, so that the first one ends the text.
    return f"free_calls: before calls\nbefore{'[lazy]' if begin.startswith(chr(34)) else ''}: TEXT {begin}"


def _start(spell: Spell, think: ThinkMarks | None, *, is_open: bool, thinking: Thinking) -> str:
    """Return the rules of an answer with its reasoning and the white space after that."""
    rules = ["ANY: /(?s:.*)/"]
    if think is None:
        return "\n".join(["start: answer", *rules])
    begin, end = map(spell, think)
    opened = "" if is_open else rf"/\s*/ {begin} "
    return "\n".join(
        (
            f"start: {'thought' if is_open else 'thought?'} answer",
            "thought: marked /\\s{0,2}/",
            f"marked{'[lazy]' if end.startswith(chr(34)) else ''}: {opened}{thinking.symbol} {end}",
            *thinking.rules,
            *rules,
        )
    )


def _arguments(
    asked: AskedTools,
    unnamed: UnnamedProperties,
    whitespace: str,
    form: ToolFormat | None = None,
    spell: Spell = literal,
) -> str:
    """Return the rules of the arguments of each function. Raises InvalidRequestError."""
    options: dict[str, object] = {"whitespace_flexible": False}
    if whitespace:
        options["whitespace_pattern"] = whitespace
    # Before they are rewritten, which takes some tenths of a second for so many characters at worst.
    _check_length(sum(len(json.dumps(asked.schema_of(function))) for function in asked.functions))
    rules, effort = list[str](), Effort()
    for i, function in enumerate(asked.functions):
        rule = f"arguments_{i}"
        try:
            schema = rewrite(asked.schema_of(function), unnamed, effort)
            if form is not None and form.arguments is not None:
                rules += form.arguments(Arguments(rule, schema, kinds_of(function.parameters or {}), options), spell)
                continue
        except SchemaError as error:
            raise InvalidRequestError(_fault(function.name, str(error)), param="tools") from None
        rules.append(f"{rule}: %json {json.dumps({**schema, 'x-guidance': options} if schema else schema)}")
    return "\n".join(rules)


def _fault(name: str, reason: str) -> str:
    return f"the parameters of the function {name!r} cannot be compiled: {reason}"


def _join(rules: list[str], wanted: Grammar | None) -> Grammar:
    text = "\n".join(rules)
    _check_length(len(text))
    return Grammar("lark", text) if wanted is None else replace(wanted, frame=text)


def _check_length(length: int) -> None:
    if length > MAX_GRAMMAR_LENGTH:
        message = f"tools may make a grammar of at most {MAX_GRAMMAR_LENGTH} characters, got {length}"
        raise InvalidRequestError(message, param="tools")
