"""A command in a terminal, as a user types into it and reads it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys

from tests.server.serving import LIMIT_S, ROOT

MAIN = """
import fcntl, signal, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
from gptserve.server.cli.main import main
main(sys.argv[1:])
"""
CTRL_D = "\x04"
PATIENCE_S = 5.0  # until a key is pressed again


class Terminal:
    """`gptserve` with these arguments in a terminal of its own; stdin is a pipe if `given` is to come from one."""

    def __init__(self, *arguments: str, given: str | None = None, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self._popen = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "LC_ALL": "C.UTF-8", "INPUTRC": os.devnull} | environment,
            stdin=slave if given is None else subprocess.PIPE,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        if given is not None:
            assert self._popen.stdin is not None
            with self._popen.stdin as pipe:
                pipe.write(given.encode())
        self._unread = b""

    def type(self, text: str | bytes) -> None:
        """Type; the end of a line is the Enter key."""
        os.write(self._master, text.encode() if isinstance(text, str) else text)

    def press_ctrl_c(self, then: str) -> None:
        """Press Ctrl-C until `then` comes: a signal just before CPython waits is acted on only at the next one."""
        for _ in range(round(LIMIT_S / PATIENCE_S)):
            self.type("\x03")
            if self._comes(then, PATIENCE_S):
                return
        raise AssertionError(f"{then!r} never came: {self._unread!r}")

    def wait_for(self, text: str) -> str:
        """Return what comes up to `text`, with its control characters, and with it."""
        assert self._comes(text, LIMIT_S), f"{text!r} never came: {self._unread!r}"
        part = _as_sent(text)
        seen, _, self._unread = self._unread.partition(part)
        return (seen + part).decode(errors="backslashreplace").replace("\r\n", "\n")

    def _comes(self, text: str, limit_s: float) -> bool:
        """Whether `text` comes, and nothing keeps still for so long before."""
        while _as_sent(text) not in self._unread:
            readable, _, _ = select.select([self._master], [], [], limit_s)
            if not readable:
                return False
            self._unread += os.read(self._master, 65536)
        return True

    def wait(self) -> int:
        """Return the exit status."""
        return self._popen.wait(LIMIT_S)

    def close(self) -> None:
        """End it if it runs."""
        self._popen.kill()
        self._popen.wait(LIMIT_S)
        os.close(self._master)


def _as_sent(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode()
