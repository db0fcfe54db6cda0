"""Random schemas of all keywords that are rewritten: each is refused in words, or what its grammar writes validates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gptserve.engine.grammar.compiler import Compiler, GrammarError
from gptserve.engine.grammar.grammar import Grammar, UnnamedProperties
from gptserve.engine.grammar.matcher import Matcher
from gptserve.weights.tokenizers.tokenizer import Tokenizer

STORYTELLER = Path(__file__).parents[4] / "weights" / "storyteller"
COMPILER, TOKENIZER = Compiler(STORYTELLER), Tokenizer.open(STORYTELLER)
ENDS = {0, 2029}
NAMES = ["a", "b", "type", "$ref", "kind"]
LEAVES: list[Any] = [
    *({"type": "null"}, {"type": "boolean"}, {"type": "integer", "minimum": 2.5}, {"type": "string", "maxLength": 3}),
    *({"type": "number", "exclusiveMinimum": low, "maximum": 1.5} for low in (-1, 0, 1)),
    *({"const": value} for value in (1, "x", None, [1], {"a": 1})),
    *({"enum": ["x", "y", 2]}, True, False, {}, {"$ref": "#"}, {"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}),
]
OF_OBJECTS: list[tuple[float, str, list[Any]]] = [
    (0.5, "required", [[], ["a"], ["kind", "b"]]),
    (0.25, "additionalProperties", [True, False, {"type": "integer"}]),
    (0.15, "unevaluatedProperties", [True, False]),
    (0.15, "patternProperties", [{"^z": {"type": "integer"}}]),
    (0.1, "propertyNames", [{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"maxLength": 1}]),
    (0.1, "minProperties", [0, 1, 3]),
]


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.random() if depth else 0.0
    if kind < 0.25:
        return rng.choice(LEAVES)
    if kind < 0.6:
        named = {name: drawn(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
        more = {key: rng.choice(values) for share, key, values in OF_OBJECTS if rng.random() < share}
        applied = {key: [drawn(rng, depth - 1)] * 2 for key in ("anyOf", "allOf") if rng.random() < 0.15}
        return {"type": "object", "properties": named, **more, **applied}
    if kind < 0.75:
        return {"type": "array", "items": drawn(rng, depth - 1), "maxItems": rng.randint(0, 2)}
    beside = {"$ref": "#/$defs/p"} if rng.random() < 0.2 else {}
    parts = [drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {rng.choice(["anyOf", "oneOf", "allOf"]): parts, **beside}


def written(matcher: Matcher, rng: random.Random) -> str | None:
    """Return a text that a grammar allows, drawn token by token; None if it is not done after some."""
    known: list[int] = []
    while len(known) < 100:
        [row] = matcher.masks(known, (), 0)
        allowed = set(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist())
        assert allowed, matcher.fault
        if ENDS & allowed and (allowed <= ENDS or rng.random() < 0.5):
            return TOKENIZER.decode(known)
        choices = sorted(allowed - ENDS)
        closing = [token_id for token_id in choices if TOKENIZER.token_bytes(token_id)[-1:] in (b'"', b"}", b"]")]
        known.append(rng.choice(closing if closing and rng.random() < 0.4 else choices))
    return None


@given(st.integers(0, 2**32), st.sampled_from(["allow", "refuse"]))
def test_a_schema_is_refused_or_followed(seed: int, unnamed: UnnamedProperties) -> None:
    rng = random.Random(seed)
    schema = {"anyOf": [drawn(rng, 3), {"const": "other"}], "$defs": {"p": drawn(rng, 2), "q": drawn(rng, 2)}}
    try:
        matcher = COMPILER.compile(Grammar("json", json.dumps(schema), unnamed_properties=unnamed))
    except GrammarError:
        return
    for _ in range(4):
        text = written(matcher.copy(), rng)
        if text is not None:
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            except RecursionError:  # the validator follows a $ref to itself for ever
                return
