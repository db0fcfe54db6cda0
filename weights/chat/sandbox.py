"""Renders chat templates: the Jinja of `transformers`, in a sandbox.

A template comes with the model and may be faulty or hostile. It cannot reach files, modules or attributes that begin
with an underscore, and cannot change its arguments. Every turn of a loop, every call and every sum, product or join
checks limits of time and size, so that neither a template nor a client's conversation can hold up the server. One
filter or method by itself is not bounded. template.py imports this, and so Jinja, when a template is first rendered.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_LIMIT_S = 5.0  # a hundred times what the longest conversation takes
MAX_CHARACTERS = 2**24  # eight times the largest request body


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates and renders them within limits of time and size."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self._deadline = threading.local()
        self.filters |= {"tojson": _to_json, "counted": self._count, "joined": self._join}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        del self.globals["lipsum"]

    def compile_bounded(self, source: str) -> Template:
        """Return the template. Raises TemplateError."""
        tree: nodes.Template = _Bounds().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def render(self, template: Template, variables: Mapping[str, object]) -> str:
        """Return the text. Raises whatever the template does."""
        self._deadline.at = time.monotonic() + RENDER_LIMIT_S
        parts, size = [], 0
        for part in template.generate(variables):
            size += len(part)
            _check_size(size)
            parts.append(part)
        return "".join(parts)

    def call(self, context: Context, function: object, /, *args: object, **kwargs: object) -> object:
        """Call a function for the template."""
        self._check_time()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Compute a sum, a product or a power for the template, unless it may be enormous."""
        sizes = [len(value) if isinstance(value, Sized) else value for value in (left, right)]
        if operator != "+":
            _check_size(math.prod(abs(size) for size in sizes if isinstance(size, int | float)))
        elif isinstance(left, Sized):
            _check_size(sum(size for size in sizes if isinstance(size, int)))
        return super().call_binop(context, operator, left, right)

    @pass_context  # without it, Jinja would run a loop over constants while compiling
    def _count(self, _context: Context, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            self._check_time()
            yield item

    @pass_context
    def _join(self, _context: Context, parts: Iterable[object]) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise SecurityError(f"it took longer than {RENDER_LIMIT_S:g} s")


class GenerationTag(Extension):
    """{% generation %}…{% endgeneration %}: marks the assistant's text for training; ignored here."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Bounds(NodeTransformer):
    """Adds the checks to loops and joins (`~`), for which the environment has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2 finds it by the node's name
        node.iter = _filter("counted", node.iter)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return self.generic_visit(_filter("joined", nodes.List(node.nodes, lineno=node.lineno)))


def _filter(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(f"it makes more than {MAX_CHARACTERS} characters")


def _to_json(value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    """Return JSON without escapes for HTML: a model reads it, not a web page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
