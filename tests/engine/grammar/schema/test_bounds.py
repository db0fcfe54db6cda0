"""Small schemas that would make much work: each part is looked at a bounded number of times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gptserve.engine.grammar.schema import objects, options
from gptserve.engine.grammar.schema.document import Document, SchemaError
from gptserve.engine.grammar.schema.effort import Effort
from gptserve.engine.grammar.schema.rewrite import rewrite

A = {"allOf": [{"$ref": "#/$defs/A"}]}
TOO_MANY_SCHEMAS = "$ref, allOf, anyOf and oneOf bring too many schemas together"


def units(num_units: int, part: Any, unit: Any = A) -> dict[str, Any]:
    return {"type": "object", "$defs": {"A": part}, "properties": {f"{i:x}": unit for i in range(num_units)}}


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Return a list that gets an item with each call of a function."""
    calls: list[None] = []
    given = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return given(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_what_a_definition_names_is_found_once_for_all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count(monkeypatch, objects, "_add")
    rewrite({**units(200, {"anyOf": [{} for _ in range(300)]})}, "refuse")
    assert 700 <= len(looks) <= 3 * 200 + 2 * 300


def test_each_unit_still_names_what_its_definitions_do() -> None:
    parts = {"properties": {"x": True}, "anyOf": [{"required": ["x"]}, {"$ref": "#/$defs/A"}]}
    for made in rewrite(units(3, parts), "refuse")["properties"].values():
        assert made["allOf"][-1] == {"properties": {"x": True}, "additionalProperties": False}


def test_circles_are_looked_at_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count(monkeypatch, objects, "_add")
    circle = {f"{i}": {"anyOf": [*({"$ref": f"#/$defs/{k}"} for k in range(70)), {}]} for i in range(70)}
    with pytest.raises(SchemaError) as caught:
        rewrite({"$defs": circle, "properties": {"x": {"$ref": "#/$defs/0"}}}, "refuse")
    assert str(caught.value).endswith(TOO_MANY_SCHEMAS)
    assert len(looks) <= objects.MAX_LOOKS + 1


@pytest.mark.parametrize("unnamed", ["allow", "refuse"])
def test_names_count_too(unnamed: Any) -> None:
    part = {"properties": {f"{i:x}": True for i in range(2500)}}
    with pytest.raises(SchemaError, match=r"bring too many schemas together|too many properties come through"):
        rewrite(units(1000, part), unnamed)


def test_long_names_that_would_be_written_often_are_refused() -> None:
    with pytest.raises(SchemaError) as caught:
        rewrite(units(100, {"properties": {"x" * 10_000: True}}), "refuse")
    assert str(caught.value).endswith("too many properties come through $ref or allOf, anyOf and oneOf")
    assert len(json.dumps(rewrite(units(15, {"properties": {"x" * 10_000: True}}), "refuse"))) < 2 * 200_000


def test_references_one_after_the_other_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(150)} | {"150": {"type": "null"}}
    schema = {"$defs": chain}
    document = Document(schema)
    looks = count(monkeypatch, document, "resolve")
    for _ in range(10):
        for i in range(150):
            assert document.follow(chain[f"{i}"], schema) == ({"type": "null"}, schema)
    assert len(looks) == 150


def test_the_values_of_options_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count(monkeypatch, options, "_kind")
    others = [{"allOf": [{"$ref": "#/$defs/A"}], "const": i} for i in range(40)]
    assert rewrite({"oneOf": others, "$defs": {"A": {"type": "integer"}}}, "refuse")
    assert len(looks) <= 3 * 40


def test_options_with_many_values_are_not_compared_for_ever() -> None:
    part = {"enum": list(range(5000))}
    others = [{"allOf": [part], "type": "object", "properties": {f"{i}": part}} for i in range(100)]
    with pytest.raises(SchemaError, match="a oneOf "):
        rewrite({"oneOf": others}, "refuse")


def test_the_schemas_of_a_request_share_their_bounds() -> None:
    ranges = {"oneOf": [{"type": "integer", "minimum": 2 * i, "maximum": 2 * i} for i in range(30)]}
    effort = Effort()
    rewrite({"oneOf": [{"const": i} for i in range(500)]}, "refuse", effort)
    assert effort.num_compared == 0  # different constants are seen at once
    rewrite(ranges, "refuse", effort)
    assert effort.num_compared >= 30 * 29 / 2
    effort.num_compared = options.MAX_LOOKS
    with pytest.raises(SchemaError, match=r"^a oneOf has too many options to compare$"):
        rewrite(ranges, "refuse", effort)
