"""`gptserve chat`: a conversation with a running server in a terminal, or one answer to what a pipe brings."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.remote import Piece, Remote
from gptserve.server.cli.replicas import Replicas
from gptserve.server.cli.terminal import visible

HELP = """\
A message is a line. A backslash at its end continues it on the next line.
Lines that you paste are one message.
  /system TEXT   set the system prompt; without TEXT, remove it
  /reset         forget the conversation, but not the system prompt
  /save FILE     write the conversation to a new file, as a request body
  /help          show this
  /exit          leave, as Ctrl-D does
Ctrl-C stops an answer; the conversation keeps its text so far.
To begin a message with a slash, put a blank before it."""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Chat:
    """A conversation. `system` is the system prompt, `turns` are the other messages: questions and answers in turn."""

    def __init__(self, remote: Remote | Replicas, asked: Mapping[str, object], system: str | None) -> None:
        self._remote = remote
        self._asked = asked
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.is_cut_off = False
        """Whether the last answer ended at a limit of tokens."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system prompt and the turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def ask(self, question: str) -> Generator[Piece]:
        """Yield the pieces of the answer.

        An answer that fails is forgotten with its question, and so is one that is interrupted before it has text.
        """
        answer = {"role": "assistant", "content": ""}
        self.turns.append({"role": "user", "content": question})
        body = {"messages": self.messages, **self._asked}
        self.turns.append(answer)
        self.is_cut_off = False
        try:
            for piece in self._remote.stream("/v1/chat/completions", body):
                answer["content"] += piece.text
                self.is_cut_off = piece.finish_reason == "length"  # that of the last event counts
                yield piece
        except (CommandError, KeyboardInterrupt, GeneratorExit) as error:
            if isinstance(error, CommandError) or not answer["content"]:
                del self.turns[-2:]
            raise


def converse(chat: Chat) -> None:
    """Talk with the user of a terminal until the user leaves."""
    with contextlib.suppress(ImportError):  # not every Python has it; without it lines are not edited
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            message = _read_message()
            if message.startswith("/"):
                _run_command(chat, message)
            elif message.strip():
                _print_answer(chat, message)
        except CommandError as error:
            print(f"gptserve: {visible(str(error))}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")
        except EOFError:
            return


def _read_message() -> str:
    """Return the next message. Raises CommandError, KeyboardInterrupt, and EOFError after Ctrl-D."""
    lines: list[str] = []
    try:
        while not lines or lines[-1].endswith("\\"):
            lines.append(input(". " if lines else "> "))
        message = "\n".join(line.removesuffix("\\") for line in lines)
        message.encode()  # surrogates stand for bytes that are not UTF-8
    except EOFError:
        print()
        raise
    except UnicodeError as error:
        raise CommandError("a message must be UTF-8") from error
    return message


def _print_answer(chat: Chat, question: str) -> None:
    """Print the answer as it streams, its reasoning dim. Raises CommandError; Ctrl-C only ends the answer."""
    is_reasoning = False
    try:
        with contextlib.closing(chat.ask(question)) as pieces:
            for piece in pieces:
                if piece.reasoning:
                    print(_DIM + visible(piece.reasoning) + _PLAIN, end="", flush=True)
                    is_reasoning = True
                if piece.text:
                    print("\n\n" * is_reasoning + visible(piece.text), end="", flush=True)
                    is_reasoning = False
    except KeyboardInterrupt:
        print("\n(stopped)", end="")
    finally:
        print()
    if chat.is_cut_off:
        print("(cut off at the limit of tokens)")


def _run_command(chat: Chat, message: str) -> None:
    """Carry out a command. Raises CommandError if it cannot, EOFError to leave."""
    command, _, argument = message.partition(" ")
    match command, argument.strip():
        case "/help", "":
            print(HELP)
        case "/exit", "":
            raise EOFError
        case "/reset", "":
            chat.turns.clear()
            print("(the conversation is empty)")
        case "/system", text:
            chat.system = text
            print("(the system prompt is set)" if text else "(there is no system prompt)")
        case "/save", "":
            raise CommandError("/save needs a file, such as /save chat.json")
        case "/save", name:
            _save(chat, name)
        case _:
            raise CommandError(f"there is no command {message!r}; /help lists the commands")


def _save(chat: Chat, name: str) -> None:
    try:
        path = Path(name).expanduser()
        with path.open("x", encoding="utf-8") as file:
            json.dump({"messages": chat.messages}, file, ensure_ascii=False, indent=2)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:  # no such home, or a null character
        raise CommandError(f"cannot write {name}: {error}") from error
    print(f"(saved {len(chat.messages)} messages to {path})")
