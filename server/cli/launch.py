"""A server of one's own: `gptserve serve` as a child process on a free port. `gptserve doctor` calls it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, cast

from gptserve.server.cli.errors import CommandError

ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

_MAIN = "from gptserve.server.command import main; main()"
_READY = " ready on "  # as the log says it
_FLAGS = ("--host", "127.0.0.1", "--port", "0", "--log-format", "text", "--log-level", "info")


@contextmanager
def started_server(
    *arguments: str, environment: Mapping[str, str] | None, show: Callable[[str], object]
) -> Iterator[str]:
    """Serve with these arguments; give the URL once it answers. Raises CommandError.

    `show` gets the lines of its log. SIGTERM ends the block as Ctrl-C does, so that the server ends, too.
    """
    command = [sys.executable, "-P", "-c", _MAIN, "serve", *arguments, *_FLAGS]
    with ExitStack() as stack:
        with _signals_held():
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
            stderr = cast(IO[str], process.stderr)
            reader = threading.Thread(target=_pass_on, args=(stderr, show))  # a full pipe would stop the server
            stack.callback(lambda: reader.join() if reader.is_alive() else None)
            stack.callback(process.terminate)
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        url = _wait_until_ready(stderr, show)
        with _signals_blocked():  # else the thread takes those that the main thread blocks
            reader.start()
        yield url


@contextmanager
def _signals_held() -> Iterator[None]:
    """Raise KeyboardInterrupt for ENDING_SIGNALS at the end of the block, and not within it.

    A process that is started within it is known to the caller when one is raised. It does not inherit this, as it would
    a blocked signal.
    """
    held: list[int] = []
    previous = {number: signal.signal(number, lambda which, _: held.append(which)) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block ENDING_SIGNALS in this thread and those it starts: they wait for the end of the block."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _wait_until_ready(stderr: IO[str], show: Callable[[str], object]) -> str:
    for line in stderr:
        if _READY in line:
            return line.partition(_READY)[2].split()[0]
        show(line)
    raise CommandError("the server did not start")


def _pass_on(stderr: IO[str], show: Callable[[str], object]) -> None:
    for line in stderr:
        show(line)
