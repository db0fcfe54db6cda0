"""A format of tool calls from another distribution: installed, found by its entry point, read, forced by a grammar."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptserve.server.tools.formats import GROUP, format_named, format_of, formats
from gptserve.weights.errors import ChatTemplateError
from tests.server.api.test_tools import TOOLS, MakeApi, engine_of, function_calls

PROJECT = f"""\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "loud-calls"
version = "1"
[project.entry-points."{GROUP}"]
loud = "loud_calls:LOUD"
[tool.setuptools]
py-modules = ["loud_calls"]
"""
MODULE = '''\
"""CALL NAME {...} on a line of its own."""
import re

from gptserve.server.tools.format import ToolFormat, literal
from gptserve.server.tools.json_call import read_object


def read(tape, parts, tools):
    while (yield from tape.pass_until(("CALL ",), parts.add_text)):
        pieces = []
        yield from tape.pass_run(re.compile("[a-z_]+"), pieces.append)
        yield from tape.skip_space()
        parts.begin_call("".join(pieces))
        yield from read_object(tape, parts.add_arguments)
        yield from tape.skip_space()


def rules(calls, spell):
    call = calls.either(lambda name, arguments: literal(name + " ") + " " + arguments)
    return f"calls: call {calls.repeated(literal(chr(10) + 'CALL '))}\\ncall: {call}\\n"


LOUD = ToolFormat(signs=("CALL name",), begin="CALL ", marks=(), read=read, rules=rules)
'''
ANSWER = 'Hm.CALL get_weather {"city": "Oslo"}\nCALL get_time {}'


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the distribution is installed."""
    project, folder = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("installed")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "loud_calls.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--no-build-isolation", "--target", folder, project], check=True, timeout=300)
    return folder


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Look for entry points in each test."""
    formats.cache_clear()
    yield
    formats.cache_clear()


def declare(folder: Path, text: str) -> None:
    (folder / "other-1.dist-info").mkdir()
    (folder / "other-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (folder / "other-1.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\n{text}\n")


@pytest.mark.slow
def test_a_format_of_another_distribution_is_one_of_the_formats(
    installed: Path, monkeypatch: pytest.MonkeyPatch, make_api: MakeApi
) -> None:
    monkeypatch.syspath_prepend(installed)  # type: ignore[no-untyped-call]
    assert format_of("{{ tools }} Answer by CALL name") is format_named("loud")
    api = make_api(engine_of("hermes", ANSWER), template="{{ tools }} CALL name")
    for fields in ({}, {"tool_choice": "required"}):
        [choice] = api.chat(tools=TOOLS, **fields).json()["choices"]
        assert function_calls(choice["message"]) == [("get_weather", '{"city": "Oslo"}'), ("get_time", "{}")]
        assert choice["message"]["content"] == (None if fields else "Hm.")
    free, forced = (request.params.grammar for request in api.engine.submitted)
    assert free is None
    assert forced is not None
    assert '"CALL "' in forced.text


def test_an_operator_may_name_it(installed: Path, monkeypatch: pytest.MonkeyPatch, make_api: MakeApi) -> None:
    monkeypatch.syspath_prepend(installed)  # type: ignore[no-untyped-call]
    api = make_api(engine_of("hermes", ANSWER), template="{{ tools }} <tool_call>", tool_call_format="loud")
    [choice] = api.chat(tools=TOOLS).json()["choices"]
    assert [name for name, _ in function_calls(choice["message"])] == ["get_weather", "get_time"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hermes = json:loads", "has the name of another format"),
        ("mine = json:loads", "must be a ToolFormat, got function"),
        ("mine = json:none", "cannot be loaded: AttributeError"),
        ("mine = nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_format_that_is_none_is_refused_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    declare(tmp_path, text)
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(ChatTemplateError, match=rf"^the entry point {text.split(' ')[0]} of {GROUP}, .*, {reason}"):
        formats()


def test_a_name_that_no_format_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ChatTemplateError, match=r"tool_call_format must be one of apriel, .*, seed, got 'xml'$"):
        format_named("xml")
