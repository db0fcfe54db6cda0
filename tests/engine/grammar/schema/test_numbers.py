"""What a grammar of bounds writes is within them, and numbers well within them can be written."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gptserve.engine.grammar.compiler import Compiler, GrammarError
from gptserve.engine.grammar.grammar import Grammar
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.grammar.schema.document import SchemaError
from gptserve.engine.grammar.schema.numbers import MAX_INTEGER, rewrite_bounds
from gptserve.weights.tokenizers.tokenizer import Tokenizer

STORYTELLER = Path(__file__).parents[4] / "weights" / "storyteller"
COMPILER, TOKENIZER = Compiler(STORYTELLER), Tokenizer.open(STORYTELLER)
EOS = 0
FLOATS = st.sampled_from([0.0, 0.1, 0.5, 0.25, 1.0, 1.5, 2.0, 2.75, 9.99, 10.0, 99.5, 100.0, 1e-7, 12345.678, 1e15])
BOUNDS = st.one_of(FLOATS, st.integers(0, 12), st.floats(0, 3).map(lambda value: round(value, 3)))
SIGNED = st.tuples(BOUNDS, st.sampled_from([1, -1])).map(lambda drawn: drawn[0] * drawn[1])
STEPS = st.sampled_from([1, 2, 3, 0.1, 0.5, 0.25, 7, 1.5])
NAMES = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
SCHEMAS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer"])},
    optional={**dict.fromkeys(NAMES, SIGNED), "multipleOf": STEPS},
)


def is_within(value: Decimal, schema: dict[str, Any]) -> bool:
    def exact(name: str) -> Decimal:
        return Decimal(str(schema[name]))

    return all(
        (
            "minimum" not in schema or value >= exact("minimum"),
            "exclusiveMinimum" not in schema or value > exact("exclusiveMinimum"),
            "maximum" not in schema or value <= exact("maximum"),
            "exclusiveMaximum" not in schema or value < exact("exclusiveMaximum"),
            "multipleOf" not in schema or value % exact("multipleOf") == 0,
            schema["type"] == "number" or value % 1 == 0,
        )
    )


def writes(matcher: Matcher, text: str) -> bool:
    """Whether a text, token by token, and then the end is allowed."""
    known: list[int] = []
    for token_id in (*TOKENIZER.encode(text), EOS):
        [row] = matcher.masks(known, (), 0)
        if not row[token_id >> 5] >> (token_id & 31) & 1:
            return False
        known.append(token_id)
    return True


def candidates(schema: dict[str, Any]) -> list[str]:
    """Return numbers as text: the bounds, what is next to them in several notations, and some others."""
    found = {"0", "-0", "0.0", "-0.0", "1", "-1", "7", "0.05", "-0.05", "3.5", "-21", "1e2", "123456789"}
    for name in (*NAMES, "multipleOf"):
        if name not in schema:
            continue
        value = Decimal(str(schema[name]))
        for shift in ("0", "1", "-1", "0.1", "-0.1", "0.001", "-0.001", "1e-12", "-1e-12"):
            text = f"{value + Decimal(shift):f}"
            found |= {text, text.split(".")[0], text + ("0" if "." in text else ".0")}
    return sorted(found)


@given(SCHEMAS)
@example({"type": "number", "exclusiveMinimum": 0, "maximum": 0.1})
@example({"type": "number", "exclusiveMaximum": 0, "minimum": -0.1})
@example({"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 2.5})
@example({"type": "number", "exclusiveMinimum": -3, "maximum": -2.5})
@example({"type": "number", "exclusiveMaximum": -2, "minimum": -2.5})
@example({"type": "number", "exclusiveMaximum": 0.0, "minimum": -12345.678})
@example({"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7})
@example({"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 1.5})
def test_what_may_be_written_is_within_the_bounds(schema: dict[str, Any]) -> None:
    try:
        matcher = COMPILER.compile(Grammar("json", json.dumps(schema)))
    except GrammarError:
        return
    for text in candidates(schema):
        if writes(matcher.copy(), text):
            assert is_within(Decimal(text), schema), text


@given(SCHEMAS)
@example({"type": "integer", "exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5})
def test_plain_numbers_within_the_bounds_may_be_written(schema: dict[str, Any]) -> None:
    if schema.get("multipleOf", 1) % 1:
        return  # llguidance wants as many places as the step has
    inside = [
        text
        for text in candidates(schema)
        if is_within(Decimal(text), schema)
        and text == f"{Decimal(text):f}".rstrip("0").rstrip(".")
        and (schema["type"] == "number" or "." not in text)
        and text != "-0"
    ]
    if not inside:
        return
    matcher = COMPILER.compile(Grammar("json", json.dumps(schema)))
    for text in inside:
        padded = [
            text,
            *(text + zeros for zeros in ("0", "00", "000", "0" * 6) if "." in text),
        ]  # 0.6 up to 0.625 is 0.60
        assert any(writes(matcher.copy(), written) for written in padded), text


def test_merged_bounds_are_kept() -> None:
    schema = {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.1}], "type": "number"}
    matcher = COMPILER.compile(Grammar("json", json.dumps(schema)))
    cases = {"0": False, "0.0": False, "0.1": True, "0.05": True, "0.2": False, "-0": False}
    assert {text: writes(matcher.copy(), text) for text in cases} == cases


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": 2**53 + 1}, 2**53 + 2, 2**53),
        ({"maximum": 2**53 + 1}, 2**53, 2**53 + 2),
        ({"exclusiveMinimum": 2**53}, 2**53 + 2, 2**53),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, -MAX_INTEGER, 2**63),
        ({"minimum": 0, "maximum": 2**64 - 1}, MAX_INTEGER, 2**64),
        ({"minimum": 10**18}, 10**18, 10**18 - 1),
        ({"maximum": -(10**18)}, -(10**18), -(10**18) + 1),
        ({"minimum": 1.5e15, "maximum": 1e300}, 15 * 10**14, 0),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_large_bounds_are_drawn_in(kind: str, schema: dict[str, Any], good: int, bad: int) -> None:
    matcher = COMPILER.compile(Grammar("json", json.dumps({"type": kind, **schema})))
    assert not writes(matcher.copy(), str(bad))
    assert kind == "number" or writes(matcher.copy(), str(good))


@pytest.mark.parametrize(
    ("value", "is_exact"),
    [
        (2**53, True),
        (2**53 + 1, False),
        (-(2**53) - 1, False),
        (2**60, True),
        (2**63, False),
        (10**22, True),
        (10**400, False),
    ],
)
@pytest.mark.parametrize(
    "wrap", [lambda n: {"const": n}, lambda n: {"enum": ["a", n]}, lambda n: {"const": {"a": [n]}}]
)
def test_large_literals_are_exact_or_refused(value: int, is_exact: bool, wrap: Any) -> None:
    schema = wrap(value)
    grammar = Grammar("json", json.dumps(schema))
    if not is_exact:
        with pytest.raises(GrammarError, match=r"(const|enum): an integer beyond 2\^53 cannot be written exactly, got"):
            COMPILER.compile(grammar)
        return
    text = json.dumps(schema.get("const", value), separators=(",", ":"))
    assert writes(COMPILER.compile(grammar), text)
    assert not writes(COMPILER.compile(grammar), text.replace(str(value), str(value + 1)))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minimum": "1"}, "minimum must be a number, got '1'"),
        ({"maximum": True}, "maximum must be a number, got True"),
        ({"minimum": 2**70}, "integers beyond 2^63 are not supported"),
        ({"multipleOf": 0}, "multipleOf must be greater than 0 and have few digits, got 0"),
        ({"multipleOf": 0.07}, "multipleOf must be greater than 0 and have few digits, got 0.07"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        rewrite_bounds(schema, is_integer=True, is_merged=False)
    assert str(caught.value) == message


def test_numbers_beyond_the_reach_are_refused() -> None:
    with pytest.raises(SchemaError, match="numbers beyond 9e18 are not supported together with bounds"):
        rewrite_bounds({"minimum": 1e19}, is_integer=False, is_merged=False)


def test_bounds_of_draft_4_say_by_a_bool_whether_they_are_outside() -> None:
    schema = {"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}
    assert rewrite_bounds(schema, is_integer=True, is_merged=False) == {"minimum": 2, "maximum": 3}
