"""A server that `gptserve doctor` starts for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from gptserve.server.cli.launch import ENDING_SIGNALS, started_server
from tests.server.serving import LIMIT_S, MAIN, ROOT

LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell ignores it in what it runs in the background."""


def left_of(session: int) -> list[psutil.Process]:
    """Return the processes of a session that do not end."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            left += [process] if os.getsid(process.pid) == session else []
    return psutil.wait_procs(left, timeout=LIMIT_S)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_command_and_its_server(name: str) -> None:
    """In a session of its own, which is killed if the test fails."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{LISTEN}; {MAIN}", "doctor", "storyteller"],
        cwd=ROOT,
        env=os.environ | {"GPTSERVE_NUM_THREADS": "1", "GPTSERVE_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not psutil.Process(process.pid).children():
                assert time.monotonic() < deadline, "no server is started"
            process.send_signal(signal.Signals[name])
            err = process.communicate(timeout=LIMIT_S)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise

    assert (process.returncode, err) == (130, "")
    assert left_of(process.pid) == []


@pytest.mark.parametrize("number", sorted(ENDING_SIGNALS))
def test_a_signal_while_the_server_is_being_started_ends_it(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives when there is a process, and before anybody holds it."""
    started: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(1000)"], **options)
            started.append(self)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    before = {ending: signal.getsignal(ending) for ending in ENDING_SIGNALS}
    try:
        with pytest.raises(KeyboardInterrupt), started_server(environment=None, show=print):
            pytest.fail("the server is ready")
        assert [process.returncode for process in started] == [-signal.SIGTERM]
    finally:
        for process in started:
            process.kill()
            process.wait()

    assert {ending: signal.getsignal(ending) for ending in ENDING_SIGNALS} == before
