"""A conversation in a terminal, and an answer to what comes from a pipe."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.cli.conftest import StandIn
from tests.server.cli.events import chat_event, events
from tests.server.cli.terminal import CTRL_D, Terminal
from tests.server.serving import LIMIT_S

GREETING = "teller at {url}; /help lists the commands, Ctrl-D leaves\n"


@pytest.fixture
def open_chat(server: StandIn) -> Iterator[Callable[..., Terminal]]:
    """Begin a chat with the stand-in and wait for its first prompt."""
    opened: list[Terminal] = []

    def begin(*flags: str) -> Terminal:
        opened.append(Terminal("chat", "--url", server.url, *flags))
        opened[-1].wait_for(GREETING.format(url=server.url))
        opened[-1].wait_for("> ")
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def says(*pieces: str, reason: str = "stop") -> tuple[int, str]:
    return 200, events(*map(chat_event, pieces), chat_event(reason=reason), "[DONE]")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def enter(terminal: Terminal, line: str, expected: str) -> None:
    """Type a line and wait for what it brings and for the next prompt."""
    terminal.type(line + "\n")
    terminal.wait_for(expected)
    terminal.wait_for("> ")


def test_each_question_is_asked_with_what_was_said_before(open_chat: Any, server: StandIn) -> None:
    chat = open_chat("--seed", "7", "--system", "Be brief.")
    server.answer = says("I am", " Theo.")
    enter(chat, "Who are you?", "I am Theo.\n")
    server.answer = says("Well.")
    enter(chat, "And how?", "Well.\n")
    chat.type(CTRL_D)

    assert chat.wait() == 0
    first = [{"role": "system", "content": "Be brief."}, user("Who are you?")]
    assert server.path == "/v1/chat/completions"
    assert server.asked == [
        {"messages": first, "seed": 7, "stream": True},
        {"messages": [*first, assistant("I am Theo."), user("And how?")], "seed": 7, "stream": True},
    ]


def test_commands_change_the_conversation_and_are_not_sent(open_chat: Any, server: StandIn) -> None:
    chat = open_chat()
    server.answer = says("Yes.")
    enter(chat, "/help", "/save FILE")
    enter(chat, "/system Be brief.", "(the system prompt is set)\n")
    enter(chat, "one", "Yes.\n")
    enter(chat, "/reset", "(the conversation is empty)\n")
    enter(chat, "two", "Yes.\n")
    enter(chat, "/system", "(there is no system prompt)\n")
    enter(chat, " /three", "Yes.\n")
    enter(chat, "  ", "\n")
    chat.type("/exit\n")

    assert chat.wait() == 0
    brief = {"role": "system", "content": "Be brief."}
    assert [asked["messages"] for asked in server.asked] == [
        [brief, user("one")],
        [brief, user("two")],
        [user("two"), assistant("Yes."), user(" /three")],
    ]


WRONG_COMMANDS = (
    ("/store x", "gptserve: there is no command '/store x'; /help lists the commands\n"),
    ("/reset now", "gptserve: there is no command '/reset now'; /help lists the commands\n"),
    ("/save", "gptserve: /save needs a file, such as /save chat.json\n"),
    ("/save {folder}", "gptserve: cannot write {folder}: File exists\n"),
    ("/save {folder}/no/such", "gptserve: cannot write {folder}/no/such: No such file or directory\n"),
    ("/save ~no-such-user/chat", "gptserve: cannot write ~no-such-user/chat: Could not determine home directory."),
)


@pytest.mark.slow
def test_a_wrong_command_is_one_sentence(open_chat: Any, tmp_path: Path) -> None:
    chat = open_chat()
    for command, expected in WRONG_COMMANDS:
        enter(chat, command.format(folder=tmp_path), expected.format(folder=tmp_path))


def test_a_conversation_is_saved_as_a_body(open_chat: Any, server: StandIn, tmp_path: Path) -> None:
    server.answer = says("Théo.")
    chat = open_chat()
    enter(chat, "Who?", "Théo.\n")
    enter(chat, f"/save {tmp_path / 'chat.json'}", f"(saved 2 messages to {tmp_path / 'chat.json'})\n")

    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert saved == {"messages": [user("Who?"), assistant("Théo.")]}


@pytest.mark.slow
def test_a_backslash_continues_a_message_on_the_next_line(open_chat: Any, server: StandIn) -> None:
    server.answer = says("Yes.")
    chat = open_chat()
    chat.type("one\\\n")
    chat.wait_for(". ")
    enter(chat, "two", "Yes.\n")

    assert server.asked[0]["messages"] == [user("one\ntwo")]


@pytest.mark.slow
def test_pasted_lines_are_one_message(open_chat: Any, server: StandIn) -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit does not know pasted text")
    server.answer = says("Yes.")
    chat = open_chat()
    enter(chat, "\x1b[200~one\ntwo\x1b[201~", "Yes.\n")

    assert server.asked[0]["messages"] == [user("one\ntwo")]


def test_ctrl_c_stops_the_answer_and_keeps_its_text(open_chat: Any, hold: Any, server: StandIn) -> None:
    chat = open_chat()
    hold(chat_event("Once"), chat_event(" upon"))
    chat.type("Tell me.\n")
    chat.wait_for("Once upon")
    chat.press_ctrl_c(then="\n(stopped)\n")
    chat.wait_for("> ")
    server.answer = says(" a time")
    enter(chat, "Go on.", " a time\n")

    assert server.asked[1]["messages"] == [user("Tell me."), assistant("Once upon"), user("Go on.")]


@pytest.mark.slow
def test_ctrl_c_before_the_answer_takes_the_question_back(open_chat: Any, hold: Any, server: StandIn) -> None:
    chat = open_chat()
    asked = hold()
    chat.type("Tell me.\n")
    assert asked.wait(LIMIT_S)
    chat.press_ctrl_c(then="\n(stopped)\n")
    chat.wait_for("> ")
    server.answer = says("Yes.")
    enter(chat, "Again.", "Yes.\n")

    assert server.asked[1]["messages"] == [user("Again.")]


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_drops_the_line_and_does_not_leave(open_chat: Any, server: StandIn) -> None:
    server.answer = says("Yes.")
    chat = open_chat()
    chat.type("not this")
    chat.wait_for("not this")
    chat.press_ctrl_c(then="\n(Ctrl-D or /exit leaves)\n")
    chat.wait_for("> ")
    enter(chat, "but this", "Yes.\n")

    assert server.asked[0]["messages"] == [user("but this")]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("answer", "headers", "expected"),
    [
        ((400, '{"error": {"message": "this model has no chat template"}}'), {}, "this model has no chat template\n"),
        pytest.param(
            (502, "<html>"), {}, "the server answered with status 502 and no message\n", marks=pytest.mark.slow
        ),
        pytest.param(
            (200, events(chat_event("On"), {"error": {"message": "it died"}})),
            {},
            "On\ngptserve: it died\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (200, events(chat_event("On"))),
            {},
            "On\ngptserve: the stream ended in the middle of the answer\n",
            marks=pytest.mark.slow,
        ),
        (
            (200, events(chat_event("On"))),
            {"content-length": "1000"},
            "On\ngptserve: the connection to {url} was lost: ",
        ),
    ],
)
def test_an_answer_that_fails_is_one_sentence_and_the_conversation_goes_on(
    answer: tuple[int, str], headers: dict[str, str], expected: str, open_chat: Any, server: StandIn
) -> None:
    chat = open_chat()
    server.answer = says("Theo.")
    enter(chat, "Who?", "Theo.\n")
    usual = server.headers
    server.answer, server.headers = answer, {**usual, **headers}
    enter(chat, "lost", expected.format(url=server.url))
    server.answer, server.headers = says("Well."), usual
    enter(chat, "How?", "Well.\n")

    assert server.asked[2]["messages"] == [user("Who?"), assistant("Theo."), user("How?")]


def test_a_server_that_goes_away_leaves_the_conversation(open_chat: Any, server: StandIn, tmp_path: Path) -> None:
    chat = open_chat()
    server.answer = says("Theo.")
    enter(chat, "Who?", "Theo.\n")
    server.shutdown()
    server.server_close()
    chat.type("lost\n")
    chat.wait_for(f"gptserve: no answer from {server.url}: ")
    chat.wait_for("; is `gptserve serve` running there?\n")
    chat.wait_for("> ")
    enter(chat, f"/save {tmp_path / 'chat.json'}", "(saved 2 messages")

    assert json.loads((tmp_path / "chat.json").read_text())["messages"] == [user("Who?"), assistant("Theo.")]


def test_what_a_model_says_does_not_command_the_terminal(open_chat: Any, server: StandIn) -> None:
    server.answer = says("a\x1b[2J\x9bb\x00\tc\r\nd")
    chat = open_chat()

    enter(chat, "Who?", "a\\x1b[2J\\x9bb\\x00\tc\nd\n")


@pytest.mark.slow
def test_reasoning_is_dim_and_not_sent_back(open_chat: Any, server: StandIn) -> None:
    thought = chat_event(reasoning_content="Hm.")
    server.answer = (200, events(thought, chat_event("Theo."), "[DONE]"))
    chat = open_chat()
    enter(chat, "Who?", "\x1b[2mHm.\x1b[0m\n\nTheo.\n")
    enter(chat, "Who?", "\nTheo.\n")

    assert server.asked[1]["messages"][1] == assistant("Theo.")


@pytest.mark.slow
def test_an_answer_at_its_limit_says_so(open_chat: Any, server: StandIn) -> None:
    chat = open_chat("--max-tokens", "2")
    server.answer = says("On", "ce", reason="length")
    enter(chat, "Who?", "Once\n(cut off at the limit of tokens)\n")
    server.answer = says("Theo.")

    chat.type("Who?\n")
    assert "cut off" not in chat.wait_for("Theo.\n") + chat.wait_for("> ")
    assert server.asked[0]["max_tokens"] == 2


@pytest.mark.slow
def test_bytes_that_are_no_utf_8_are_refused(open_chat: Any) -> None:
    chat = open_chat()
    chat.type(b"a\xff\n")
    chat.wait_for("gptserve: a message must be UTF-8\n")
    chat.wait_for("> ")


def test_a_chat_with_no_server_does_not_begin(server: StandIn) -> None:
    server.shutdown()
    server.server_close()
    terminal = Terminal("chat", "--url", server.url)
    terminal.wait_for(f"gptserve: no answer from {server.url}: ")
    terminal.wait_for("; is `gptserve serve` running there?\n")

    assert terminal.wait() == 1
    terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "models", ["<html>", *(pytest.param(text, marks=pytest.mark.slow) for text in ("{}", '{"data": []}', "[]"))]
)
def test_a_chat_with_another_server_does_not_begin(models: str, server: StandIn) -> None:
    server.models = models
    terminal = Terminal("chat", "--url", server.url)
    terminal.wait_for(f"gptserve: {server.url} has no models, so it is not gptserve\n")

    assert terminal.wait() == 1
    terminal.close()


def pipe(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_a_pipe_is_one_message(run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = (
        200,
        events(chat_event(reasoning_content="Hm."), chat_event("I am"), chat_event("."), "[DONE]"),
    )
    pipe("/help me\n\nWhö?\n".encode(), monkeypatch)

    assert run("chat", "--url", server.url, "--temperature", "0") == (0, "I am.\n", "")
    assert server.asked == [{"messages": [user("/help me\n\nWhö?")], "temperature": 0.0, "stream": True}]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (b"x", (400, '{"error": {"message": "this model has no chat template"}}'), "this model has no chat template"),
        (b"x", (200, events(chat_event("On"))), "the stream ended in the middle of the answer"),
        (b"ab\xff", says(""), "the text on stdin must be UTF-8, got something else at byte 2"),
        (b"\n", says(""), "the question on stdin is empty"),
    ],
)
def test_a_pipe_that_fails_is_one_sentence_and_status_1(
    text: bytes, answer: tuple[int, str], expected: str, run: Any, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = answer
    pipe(text, monkeypatch)

    status, _, err = run("chat", "--url", server.url)

    assert (status, err) == (1, f"gptserve: {expected}\n")
