"""What a body asks its answer to match: OpenAI's response_format, vLLM's structured_outputs, its older guided_*.

`completions.py` has these fields in all requests. `completions/grammar.py` checks that the grammar compiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.grammar.grammar import (
    ANY_WHITESPACE,
    MAX_GRAMMAR_LENGTH,
    Grammar,
    GrammarKind,
    UnnamedProperties,
)
from gptserve.server.schemas.base import _RequestModel

JsonSchema = Annotated[Any, Field(json_schema_extra={"type": ["object", "boolean", "string", "null"]})]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
Given = tuple[str, GrammarKind, Any]
"""The name of a field, what it holds, and its value."""

_ANY_OBJECT = {"type": "object"}


class NamedSchema(_RequestModel):
    """A JSON Schema of OpenAI's response_format. Its name and description change nothing."""

    name: str | None = None
    description: str | None = None
    schema_: JsonSchema = Field(default=None, alias="schema")
    strict: bool | None = None
    """true or false: the answer matches the schema"""


class ResponseFormat(_RequestModel):
    """OpenAI's way to ask for JSON, and llama.cpp's: `schema` beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema = Field(default=None, alias="schema")
    """the same as json_schema.schema, with json_object, too"""


class StructuredOutputs(_RequestModel):
    """vLLM's way. One of the first five is given."""

    json_: JsonSchema = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    """in llguidance's dialect of Lark"""
    whitespace_pattern: str | None = None
    """a regex of what may stand between the tokens of JSON; default none"""
    disable_any_whitespace: bool | None = None
    """false: any whitespace may stand there"""


class GrammarFields(_RequestModel):
    """The fields of a body that ask for structured output; those that are given, but the last, ask for the same.

    guidance sends one grammar by its older name, too, for older servers.
    """

    response_format: ResponseFormat | None = None
    """JSON, or JSON of a schema"""
    structured_outputs: StructuredOutputs | None = None
    """JSON of a schema, a regex, one of some texts, or a grammar"""
    guided_json: JsonSchema = None
    """the same as structured_outputs.json"""
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    """a regex of what may stand between the tokens of JSON; default none"""


def asked_grammar(body: GrammarFields, unnamed: UnnamedProperties = "refuse") -> tuple[str, Grammar | None]:
    """Return the field that asks for a grammar, and the grammar; None without any. Raises InvalidRequestError."""
    given = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs), *_of_guided(body)]
    if not given:
        return "", None
    asked = [(kind, _text(name, kind, value)) for name, kind, value in given]
    if len(set(asked)) > 1:
        names = " and ".join(name for name, _, _ in given[:2])
        raise InvalidRequestError(f"{names} may not be given together", param=given[1][0])
    name, (kind, text) = given[0][0], asked[0]
    whitespace = _whitespace(body) if kind == "json" else ""
    for field, given_text in ((name, text), ("whitespace_pattern", whitespace)):
        if len(given_text) > MAX_GRAMMAR_LENGTH:
            message = f"{field} may have at most {MAX_GRAMMAR_LENGTH} characters, got {len(given_text)}"
            raise InvalidRequestError(message, param=field)
    return name, Grammar(kind, text, whitespace, unnamed_properties=unnamed if kind == "json" else "allow")


def _of_format(given: ResponseFormat | None) -> Iterator[Given]:
    """Yield the schema of a format. OpenAI's json_schema may have none: then the answer is any object."""
    if given is None:
        return
    beside, name = given.schema_, "response_format.json_schema.schema"
    if given.type == "text":
        if beside is not None:
            message = "response_format.schema may be given only with the types json_object and json_schema"
            raise InvalidRequestError(message, param="response_format.schema")
        return
    named = given.json_schema if given.type == "json_schema" else None
    if given.type == "json_schema" and named is None and beside is None:
        raise InvalidRequestError(f"{name} must be given with the type json_schema", param=name)
    schemas = [("response_format.schema", beside), (name, None if named is None else named.schema_)]
    found: list[Given] = [(field, "json", schema) for field, schema in schemas if schema is not None]
    yield from found or [("response_format", "json", _ANY_OBJECT)]


def _of_outputs(given: StructuredOutputs | None) -> Iterator[Given]:
    if given is None:
        return
    asked: list[Given] = [
        ("json", "json", given.json_),
        ("json_object", "json", _ANY_OBJECT if given.json_object else None),
        ("regex", "regex", given.regex),
        ("choice", "choice", given.choice),
        ("grammar", "lark", given.grammar),
    ]
    found = [(f"structured_outputs.{name}", kind, value) for name, kind, value in asked if value is not None]
    if not found:
        message = "structured_outputs must have one of json, json_object, regex, choice and grammar"
        raise InvalidRequestError(message, param="structured_outputs")
    yield from found


def _of_guided(body: GrammarFields) -> Iterator[Given]:
    asked: list[Given] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "lark", body.guided_grammar),
    ]
    yield from (given for given in asked if given[2] is not None)


def _text(name: str, kind: GrammarKind, value: Any) -> str:
    """Return what a field holds as the text of a Grammar."""
    if kind == "json":
        return _schema_text(name, value)
    return json.dumps(value) if kind == "choice" else str(value)


def _schema_text(name: str, value: Any) -> str:
    """Return a JSON Schema as text; vLLM takes it as text, too."""
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise InvalidRequestError(f"{name} is not valid JSON: {error}", param=name) from None
    if not isinstance(value, dict | bool):
        message = f"{name} must be a JSON Schema: an object, true or false"
        raise InvalidRequestError(message, param=name, code="invalid_type")
    return json.dumps(value, separators=(",", ":"))


def _whitespace(body: GrammarFields) -> str:
    outputs = body.structured_outputs
    if outputs is None:
        return body.guided_whitespace_pattern or ""
    return outputs.whitespace_pattern or (ANY_WHITESPACE if outputs.disable_any_whitespace is False else "")
