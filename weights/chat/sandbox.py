"""Renders chat templates: the Jinja of `transformers`, in Jinja's own sandbox.

A template comes with the model and may be hostile. The sandbox keeps it from files, modules and attributes that begin
with an underscore, and from changing its arguments; the worker process that this runs in bounds time and memory.
template.py names `open_template` to its workers. The server imports neither this nor Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def open_template(source: str) -> Callable[[Mapping[str, object]], str]:
    """Compile a template; return the function from its variables to the text."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    template = environment.from_string(source)
    return lambda variables: template.render(variables)


class GenerationTag(Extension):
    """{% generation %}…{% endgeneration %}: marks the assistant's text for training; ignored here."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    """Return JSON without escapes for HTML: a model reads it, not a web page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
