"""A template cannot reach out of its sandbox. What it may not use up is held by tests/weights/test_workers.py."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from gptserve.weights.chat.sandbox import open_template


def render(source: str, **variables: Any) -> str:
    return open_template(source)(variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self._TemplateReference__context.environment.call }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages.clear() }}",
    ],
)
def test_a_template_reaches_nothing_of_its_process_and_changes_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(SecurityError):
        render(source, messages=messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}"])
def test_a_template_reads_no_files(source: str) -> None:
    with pytest.raises((TemplateError, TypeError), match="no loader"):
        render(source)


def test_a_range_is_limited() -> None:
    with pytest.raises(OverflowError, match="Range too big"):
        render("{% for i in range(10 ** 7) %}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 2 ** 10 - 24 * 3.5 }}", "940.0"),
        ("{{ [1] * 2 + [3] }}{{ 'a' ~ 1 ~ none ~ missing }}", "[1, 1, 3]a1None"),
        ("{% for i in missing %}{{ i }}{% else %}none{% endfor %}", "none"),
        ("{% generation %}\n  a{% endgeneration %}b", "  ab"),
    ],
)
def test_what_models_use_is_there(source: str, expected: str) -> None:
    assert render(source) == expected


def test_what_a_client_says_is_never_code() -> None:
    text = "{{ 7 * 7 }}{% raise %}{{ messages.__class__ }}"
    assert render("{{ x }}{{ x ~ x }}{{ x | trim }}{{ y[x] }}", x=text, y={text: text}) == text * 5
