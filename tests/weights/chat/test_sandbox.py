"""What a template cannot do: reach out of its sandbox, go on for ever, make enormous texts."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

import gptserve.weights.chat.sandbox
from gptserve.weights.chat.sandbox import TemplateEnvironment


def render(source: str, **variables: Any) -> str:
    environment = TemplateEnvironment()
    return environment.render(environment.compile_bounded(source), variables)


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
def test_a_template_reaches_nothing_of_the_server_and_changes_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(SecurityError):
        render(source, messages=messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}"])
def test_a_template_reads_no_files(source: str) -> None:
    with pytest.raises((TemplateError, TypeError), match="no loader"):
        render(source)


def test_there_is_no_filler_text() -> None:
    with pytest.raises(TemplateError, match="'lipsum' is undefined"):
        render("{{ lipsum(9) }}")


TURNS = "{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": "{% set r = range(100000) %}" + TURNS,
    "loops over a constant": TURNS.replace("in r", "in 'abcdefghijklmnopqrstuvwxyz' * 100"),
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a filtered loop": "{% set r = range(100000) %}" + TURNS.replace("in r %}", "in r if true %}"),
    "an output without end": "{% set r = range(100000) %}" + TURNS.replace("k in r %}", "k in r %}{{ '' }}"),
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptserve.weights.chat.sandbox, "RENDER_LIMIT_S", 0.05)
    with pytest.raises(SecurityError, match=r"^it took longer than 0\.05 s$"):
        render(source)


def test_each_rendering_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptserve.weights.chat.sandbox, "RENDER_LIMIT_S", 0.05)
    environment = TemplateEnvironment()
    endless = environment.compile_bounded(ENDLESS["loops"])
    short = environment.compile_bounded("{% for i in [1, 2] %}{{ i }}{% endfor %}")
    with pytest.raises(SecurityError):
        environment.render(endless, {})
    monkeypatch.setattr(gptserve.weights.chat.sandbox, "RENDER_LIMIT_S", 60)
    assert environment.render(short, {}) == "12"


DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = OP %}{% endfor %}"
ENORMOUS = {
    "output": "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
    "a product": "{{ 'x' * 10 ** 12 }}",
    "a product the other way": "{% set n = 10 ** 12 %}{{ n * 'x' }}",
    "a list": "{{ ([0] * 99999999) | length }}",
    "a sum of itself": DOUBLED.replace("OP", "ns.x + ns.x"),
    "a join with itself": DOUBLED.replace("OP", "ns.x ~ ns.x"),
    "a power": "{{ 9 ** 9 ** 9 }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENORMOUS.values(), ids=ENORMOUS)
def test_a_template_makes_nothing_enormous(source: str) -> None:
    with pytest.raises(SecurityError, match=r"^it makes more than 16777216 characters$"):
        render(source)


def test_a_range_is_limited() -> None:
    with pytest.raises(OverflowError, match="Range too big"):
        render("{% for i in range(10 ** 7) %}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '=' * 80 }}", "=" * 80),
        ("{{ 2 ** 10 - 24 * 3.5 }}", "940.0"),
        ("{{ [1] * 2 + [3] }}{{ 'a' ~ 1 ~ none ~ missing }}", "[1, 1, 3]a1None"),
        ("{% for i in range(5) %}{{ loop.revindex }}{{ loop.length }}{% endfor %}", "5545352515"),
        ("{% for i in missing %}{{ i }}{% else %}none{% endfor %}", "none"),
        ("{% generation %}\n  a{% endgeneration %}b", "  ab"),
    ],
)
def test_what_is_of_common_size_passes(source: str, expected: str) -> None:
    assert render(source) == expected


def test_what_a_client_says_is_never_code() -> None:
    text = "{{ 7 * 7 }}{% raise %}{{ messages.__class__ }}"
    assert render("{{ x }}{{ x ~ x }}{{ x | trim }}{{ y[x] }}", x=text, y={text: text}) == text * 5
