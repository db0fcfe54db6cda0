"""`gptserve serve` as a process of its own, for tests that need all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import httpx
import psutil

LIMIT_S = 100  # within that of a test
ROOT = Path(__file__).parents[2]
MAIN = "from gptserve.server.command import main; main()"
MORTAL = """
import sys
import gptserve.server.parts
from tests.engine import mortal_engine
from gptserve.server.cli.main import main
gptserve.server.parts.load_logging_engine = mortal_engine.load_in_server
main(sys.argv[1:])
"""
"""A server whose engine POISON kills, and that the gate named in its environment holds."""


class Process:
    """`gptserve serve` with the embedded model on a free port, in a session of its own.

    A thread reads all that it says, so that a full pipe never stops it; `lines` is what a test has waited through.
    """

    def __init__(self, *flags: str, main: str = MAIN, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", main, "serve", "--port", "0", "--device", "cpu", "--num-threads", "1", *flags],
            cwd=ROOT,
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._said: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_line(self, part: str) -> str:
        """Return the next line on stderr with `part` in it."""
        for line in self._listen():
            if part in line:
                return line
        raise AssertionError(f"{part!r} never came: {self.lines}")

    def wait_until_ready(self) -> httpx.Client:
        """Return a client of the server once it says where it is."""
        url = self.wait_for_line(" ready on ").partition(" ready on ")[2].split()[0]
        return httpx.Client(base_url=url, timeout=LIMIT_S)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return exit status and all of stderr, having seen that no child is left."""
        status = self.popen.wait(LIMIT_S)
        for _ in self._listen():
            pass
        left = [p for p in psutil.process_iter(["status"]) if p.info["status"] != "zombie" and self._has_started(p)]
        assert psutil.wait_procs(left, timeout=LIMIT_S)[1] == []
        return status, "".join(self.lines)

    def kill(self) -> None:
        """End it and all its children, if that has not happened; what nobody read is shown if the test fails."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        sys.stdout.writelines(self._listen())

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stderr:
            for line in stderr:
                self._said.put(line)
        self._said.put(None)

    def _listen(self) -> Iterator[str]:
        """Give the lines as they come, up to the last."""
        while (line := self._said.get(timeout=LIMIT_S)) is not None:
            self.lines.append(line)
            yield line
        self._said.put(None)  # so that whoever listens again hears of the end, too

    def _has_started(self, process: psutil.Process) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(process.pid) == self.popen.pid
        return False

    def engine(self) -> psutil.Process:
        """Return the engine's process."""
        return next(p for p in psutil.Process(self.popen.pid).children() if "spawn_main" in " ".join(p.cmdline()))
