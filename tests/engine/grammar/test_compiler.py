"""Which grammars compile, to which language, and the reasons of those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar import compiler
from gptserve.engine.grammar.compiler import Compiler, GrammarError
from gptserve.engine.grammar.grammar import ANY_WHITESPACE, MAX_GRAMMAR_LENGTH, Grammar
from gptserve.weights.tokenizers.tokenizer import Tokenizer

STORYTELLER = Path(__file__).parents[3] / "weights" / "storyteller"
EOS = 0
TYPE_RULE = "type must be one of null, boolean, number, string, array, object and integer, or a list of them, got "
PAIR = json.dumps({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": "x"}}, "required": ["a", "b"]})


@pytest.fixture(scope="module")
def of_storyteller() -> Compiler:
    return Compiler(STORYTELLER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(STORYTELLER)


def matches(compiler: Compiler, grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar allows each token of the text, and then its end."""
    matcher, known = compiler.compile(grammar), list[int]()
    for token in (*tokenizer.encode(text), EOS):
        [row] = matcher.masks(known, (), 0)
        if not row[token >> 5] >> (token & 31) & 1:
            return False
        known.append(token)
    return True


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (Grammar("json", PAIR), ['{"a":1,"b":"x"}'], ['{"a": 1,"b":"x"}', '{"a":1}', '{"b":"x","a":1}', ""]),
        (Grammar("json", PAIR, ANY_WHITESPACE), ['{"a":1,"b":"x"}', '{ "a":\n\t1, "b":"x"}'], ['{"a":1}']),
        (Grammar("json", PAIR, "[ ]?"), ['{"a": 1, "b": "x"}', '{"a":1,"b":"x"}'], ['{"a":  1,"b":"x"}']),
        (Grammar("json", "true"), ["[1,{}]", '"é"', "null"], ["[1, 2]", "nul"]),
        (Grammar("json", '{"type":"object","x-guidance":{"whitespace_flexible":true}}'), ["{}"], ["{ }", "[]"]),
        (Grammar("json", '{"format":"nope","type":"string"}'), ['"any"'], ["1"]),
        (Grammar("regex", r"\d{2}-\w/x"), ["12-a/x"], ["1-a/x", "12-a/xy", "٣٤-a/x", "12-é/x"]),
        (Grammar("regex", "(a|b\n)*"), ["", "ab\na"], ["c"]),
        (Grammar("regex", "^abc$"), ["abc"], ["abcd"]),
        (Grammar("choice", json.dumps(["yes", 'n"o\n', "\\é", "yes, it is"])), ["yes", 'n"o\n', "\\é"], ["no", "yes,"]),
        (Grammar("choice", json.dumps(["", "a"])), ["", "a"], ["b"]),
        (Grammar("lark", 'start: "x" | "y" start // a comment'), ["x", "yyx"], ["y", "xx"]),
        (Grammar("lark", '%llguidance {"no_forcing": false}\nstart: "once" " upon"'), ["once upon"], ["once"]),
    ],
)
def test_a_grammar_is_its_language(
    of_storyteller: Compiler, tokenizer: Tokenizer, grammar: Grammar, inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not matches(of_storyteller, grammar, tokenizer, text)] == []
    assert [text for text in outside if matches(of_storyteller, grammar, tokenizer, text)] == []


def test_no_text_matches_a_special_token(of_storyteller: Compiler, tokenizer: Tokenizer) -> None:
    [row] = of_storyteller.compile(Grammar("regex", r"<\|endoftext\|>")).masks([], (), 0)
    allowed = [token for token in range(tokenizer.vocab_size) if row[token >> 5] >> (token & 31) & 1]
    assert {tokenizer.token_bytes(token)[:1] for token in allowed} == {b"<"}
    assert EOS not in allowed


@pytest.mark.parametrize("text", ['start: "once upon"', '%llguidance {"no_forcing": false}\nstart: "once upon"'])
def test_a_text_that_must_come_may_come_in_any_tokens(
    of_storyteller: Compiler, tokenizer: Tokenizer, text: str
) -> None:
    [row] = of_storyteller.compile(Grammar("lark", text)).masks([], (), 0)
    allowed = {tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size) if row[t >> 5] >> (t & 31) & 1}
    assert {b"o", b"on"} <= allowed
    assert all(b"once upon".startswith(token) for token in allowed)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json", '{"type":"words"}'), TYPE_RULE + "'words'"),
        (Grammar("json", '{"$ref":"#/nope"}'), "$ref points to nothing, got '#/nope'"),
        (Grammar("json", '{"type":"array","uniqueItems":true}'), 'Unimplemented keys: ["uniqueItems"]'),
        (Grammar("json", '{"uniqueItems":true,"x-guidance":{"lenient":true}}'), 'Unimplemented keys: ["uniqueItems"]'),
        (Grammar("json", '{"pattern":"(","type":"string"}'), "regex parse error: ( ^ error: unclosed group"),
        (
            Grammar(
                "json", '{"$ref":"#/$defs/n","$defs":{"n":{"properties":{"x":{"$ref":"#/$defs/n","maxItems":1}}}}}'
            ),
            "circular references with sibling keys are not supported: a definition",
        ),
        (Grammar("json", "false"), "Unsatisfiable schema: schema is false"),
        (Grammar("json", "[]"), "a schema must be an object, true or false, got []"),
        (Grammar("json", "{}", "("), "regex parse error: ( ^ error: unclosed group"),
        (
            Grammar("json", '{"$ref":"https://example.com/schema"}'),
            "$ref must point into the schema itself, got 'https://example.com/schema'",
        ),
        (Grammar("regex", "(x"), 'invalid regex "(x" (in regex): regex parse error: (x ^ error: unclosed group'),
        (Grammar("lark", "start: nope"), 'at 1(8): unknown name: "nope"'),
        (Grammar("lark", "begin: /x/"), "no start rule found"),
    ],
)
def test_a_grammar_that_is_none_has_a_reason(of_storyteller: Compiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError) as raised:
        of_storyteller.compile(grammar)
    assert str(raised.value) == reason


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (
            Grammar("regex", "|".join(f"(?:[a-z]{{{n}}}x)*" for n in range(2, 60))),
            "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable "
            "limits.precompute_large_lexemes",
        ),
        (
            Grammar("lark", 'start: "x" ' + "(a | b)? " * 6000 + "\na: /a/\nb: /b/"),
            "at 1(8): grammar size (number of symbols) too big (limit for this grammar: 10000)",
        ),
    ],
)
def test_a_grammar_past_a_limit_has_a_reason(
    of_storyteller: Compiler, grammar: Grammar, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "LIMITS", {"initial_lexer_fuel": 2000, "max_grammar_size": 10000})
    with pytest.raises(GrammarError) as raised:
        of_storyteller.compile(grammar)
    assert str(raised.value) == reason


def test_a_grammar_has_a_longest_text() -> None:
    Grammar("regex", "x" * MAX_GRAMMAR_LENGTH)
    for fields in (
        {"text": "x" * (MAX_GRAMMAR_LENGTH + 1)},
        {"text": "", "whitespace": "x" * (MAX_GRAMMAR_LENGTH + 1)},
    ):
        with pytest.raises(InvalidRequestError, match="may have at most 65536 characters, got 65537"):
            Grammar("json", **fields)


def test_what_was_tried_out_changes_no_mask(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, texts = Grammar("json", "true"), ['{"a":[1,', '["x', "12", '{"é\\']
    tried = Compiler(STORYTELLER).compile(grammar)
    monkeypatch.setattr(compiler, "NUM_TRIED", 0)
    fresh = Compiler(STORYTELLER).compile(grammar)
    for text in texts:
        known = tokenizer.encode(text)
        for copy in (tried.copy(), tried.copy()):
            assert (copy.masks(known, (), 0)[0] == fresh.copy().masks(known, (), 0)[0]).all()


@pytest.mark.parametrize("num_properties", [100, 300])
def test_a_limit_that_the_first_tokens_meet_is_met_before_a_request(
    of_storyteller: Compiler, num_properties: int
) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num_properties)}}
    if num_properties == 100:
        of_storyteller.compile(Grammar("json", json.dumps(schema)))
        return
    with pytest.raises(GrammarError, match=r"Current row has .* items; max is 500; consider making your grammar"):
        of_storyteller.compile(Grammar("json", json.dumps(schema)))


def test_a_model_may_lack_special_tokens(of_storyteller: Compiler, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text((STORYTELLER / name).read_text())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    beyond = {**tokenizer["added_tokens"][-1], "id": 2030, "content": "<image_soft_token>", "special": True}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], beyond]})
    )
    grammar = Grammar("regex", "[a-z]+")

    [[expected], [found]] = (made.compile(grammar).masks([], (), 0) for made in (of_storyteller, Compiler(tmp_path)))

    assert found.tolist() == expected.tolist()
