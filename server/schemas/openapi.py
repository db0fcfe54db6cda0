"""/openapi.json: FastAPI's document, with the request bodies that routes parse themselves, and the API key."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gptserve.server.core.settings import ServerSettings
from gptserve.server.schemas.base import _Model
from gptserve.server.schemas.completions import ErrorBody

ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
"""The parameter of a path that ends with an id."""

_REF = "#/components/schemas/{model}"
_DESCRIPTIONS = {
    400: "The request breaks a rule; the message says which",
    401: "The API key is missing or wrong",
    404: "No such model, completion, file or batch",
    408: "The body did not arrive in time",
    409: "The idempotency key was used with another request, the completion was cancelled, or the file is in use",
    413: "The body is too large",
    415: "The content type is not that of the route",
    429: "The queue is full; Retry-After says when to try again",
    500: "The server failed on this request alone",
    503: "Loading, shutting down or without an engine; Retry-After says when to try again",
}


def error_responses(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for these statuses; a reference spares it a model for each of them."""
    content = {"application/json": {"schema": _one_of((body,))}}
    return {status: {"description": _DESCRIPTIONS[status], "content": content} for status in statuses}


def event_stream(
    *chunks: type[BaseModel], error: type[BaseModel] = ErrorBody, end: str | None = "[DONE]"
) -> dict[str, Any]:
    """Return FastAPI's description of server-sent events: data is one of `chunks` or an error, at last `end`."""
    json_data = {"contentMediaType": "application/json", "contentSchema": _one_of((*chunks, error))}
    data = {"type": "string", "anyOf": [json_data, *([] if end is None else [{"const": end}])]}
    event = {"type": "object", "properties": {"id": {"type": "string"}, "data": data}, "required": ["data"]}
    return {"content": {"text/event-stream": {"schema": event}}}


def links_to_completion(completion_id: str) -> dict[str, Any]:
    """Return FastAPI's description of what can be done next with a background completion.

    `completion_id` is the runtime expression of its id: https://spec.openapis.org/oas/v3.1.0#runtime-expressions
    """
    operations = ("retrieve_completion", "stream_completion", "cancel_completion")
    return {"links": {name: {"operationId": name, "parameters": {"id": completion_id}} for name in operations}}


def json_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Return FastAPI's `openapi_extra` for a route that parses its body itself, as one of `models`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _one_of(models)}}}}


def openapi_document(app: FastAPI, models: Sequence[type[BaseModel]], settings: ServerSettings) -> dict[str, Any]:
    """Return the document; `models` are those of `json_body` and of events, which FastAPI does not see."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    described: list[type[BaseModel]] = [*models, ErrorBody]
    _, definitions = models_json_schema([(model, "validation") for model in described], ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    _describe_fields(components["schemas"])
    if settings.root_path is not None:
        document["servers"] = [{"url": settings.root_path}]
    if settings.needs_key:
        of_anthropic = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "x_api_key": of_anthropic}
        document["security"] = [{"key": []}, {"x_api_key": []}]
    return document


def _describe_fields(schemas: dict[str, Any]) -> None:
    """Give the properties of our models the strings below their fields as descriptions."""
    models: list[type[BaseModel]] = [_Model]
    for model in models:  # which grows meanwhile
        models += model.__subclasses__()
    for model in models:
        fields = {field.alias or name: name for name, field in model.model_fields.items()}
        for key in (model.__name__, f"{model.__module__}.{model.__name__}".replace(".", "__")):
            properties = schemas.get(key, {}).get("properties", {})
            if properties.keys() == fields.keys():  # else it is another model of this name
                texts = _field_docstrings(model)
                for name, its_schema in properties.items():
                    if fields[name] in texts:
                        its_schema.setdefault("description", texts[fields[name]])


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the strings below the fields of a model and of those that it extends."""
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if issubclass(part, _Model):
            for name, text in _own_docstrings(part):
                found.pop(name, None)
                if text is not None:
                    found[name] = text
    return found


@functools.cache
def _own_docstrings(part: type[BaseModel]) -> list[tuple[str, str | None]]:
    """Return the fields that a model has of its own, and the strings below them. Finding its source takes long."""
    found: list[tuple[str, str | None]] = []
    (definition,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in pairwise((*definition.body, ast.Pass())):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found.append((statement.target.id, inspect.cleandoc(text)))
                case _:
                    found.append((statement.target.id, None))
    return found


def _one_of(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    references = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}
