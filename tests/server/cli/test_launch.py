"""A server that `gptserve doctor` starts for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

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
