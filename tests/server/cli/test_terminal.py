"""What commands print into a terminal, a pipe, a file, and where no one reads."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.cli.conftest import StandIn
from tests.server.cli.events import chat_event, events, text_event
from tests.server.cli.terminal import Terminal
from tests.server.serving import LIMIT_S, MAIN, ROOT

TEXT = "a\x1b[2J\x9bb\x00\tc\r\nd\u2028"
SHOWN = "a\\x1b[2J\\x9bb\\x00\tc\nd\u2028\n"
ASK = {"complete": ("complete", "x"), "chat": ("chat",)}


def say(command: str, text: str) -> tuple[int, str]:
    return 200, events(text_event(text) if command == "complete" else chat_event(text), "[DONE]")


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def begin(*arguments: str, **keywords: Any) -> Terminal:
        opened.append(Terminal(*arguments, **keywords))
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("command", ASK)
def test_an_answer_does_not_command_the_terminal(command: str, open_terminal: Any, server: StandIn) -> None:
    server.answer = say(command, TEXT)
    terminal = open_terminal(*ASK[command], "--url", server.url, given="Who?")

    assert terminal.wait_for(SHOWN) == SHOWN
    assert terminal.wait() == 0


@pytest.mark.parametrize("command", ASK)
def test_a_pipe_gets_an_answer_as_it_is(
    command: str, run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = say(command, TEXT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who?")))

    assert run(*ASK[command], "--url", server.url) == (0, f"{TEXT}\n", "")


def test_the_name_of_a_model_does_not_command_the_terminal(open_terminal: Any, server: StandIn) -> None:
    server.models = '{"data": [{"id": "teller\\u001b[2J"}]}'
    terminal = open_terminal("chat", "--url", server.url)

    terminal.wait_for(f"teller\\x1b[2J at {server.url}; ")


def test_a_terminal_shows_what_its_encoding_lacks(open_terminal: Any, server: StandIn) -> None:
    server.answer = say("complete", "Théo 🦡")
    terminal = open_terminal("complete", "x", "--url", server.url, PYTHONIOENCODING="ascii")

    shown = "Th\\xe9o \\U0001f9a1\n"
    assert terminal.wait_for(shown) == shown
    assert terminal.wait() == 0


def test_a_file_whose_encoding_lacks_a_character_is_one_sentence_and_status_1(
    run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = say("complete", "Théo")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))

    expected = r"stdout has the encoding ascii, which lacks '\xe9'; PYTHONIOENCODING=utf-8 changes it"
    assert run("complete", "x", "--url", server.url) == (1, "", f"gptserve: {expected}\n")


def test_ctrl_c_ends_a_completion_and_its_line(open_terminal: Any, hold: Any, server: StandIn) -> None:
    hold(text_event("Once"))
    terminal = open_terminal("complete", "x", "--url", server.url)
    terminal.wait_for("Once")

    terminal.press_ctrl_c(then="\n")
    assert terminal.wait() == 130


@pytest.mark.parametrize("command", [("complete", "-"), ("chat",)])
def test_a_closed_stdin_is_one_sentence_and_status_1(
    command: tuple[str, ...], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)

    assert run(*command) == (1, "", "gptserve: stdin is closed\n")


def test_a_closed_stdout_gets_nothing(run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = say("complete", "there")
    monkeypatch.setattr(sys, "stdout", None)

    assert run("complete", "x", "--url", server.url) == (0, "", "")


INTERRUPTED = """
import signal, sys
from gptserve.server.cli.main import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
main(["complete", "x", "--local"])
"""


def test_ctrl_c_while_torch_is_imported_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("arguments", "stdout", "expected"),
    [
        (("complete", "x"), "a closed pipe", ""),
        pytest.param(("inspect",), "a closed pipe", "", marks=pytest.mark.slow),
        pytest.param(
            ("complete", "x"),
            "/dev/full",
            "gptserve: cannot write to stdout: No space left on device\n",
            marks=pytest.mark.slow,
        ),
        (("inspect",), "/dev/full", "gptserve: cannot write to stdout: No space left on device\n"),
    ],
)
def test_an_output_that_cannot_be_written_is_no_traceback(
    arguments: tuple[str, ...], stdout: str, expected: str, server: StandIn
) -> None:
    server.answer = say("complete", "there")
    if stdout == "a closed pipe":
        reader, file = os.pipe()
        os.close(reader)
    elif os.path.exists(stdout):
        file = os.open(stdout, os.O_WRONLY)
    else:
        pytest.skip(f"there is no {stdout}")
    with open(file, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=ROOT,
            env=os.environ | {"GPTSERVE_URL": server.url},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    assert (done.returncode, done.stderr) == (1, expected)
