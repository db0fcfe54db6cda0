"""A server that `gptserve bench` starts for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.server.serving import LIMIT_S, MAIN, ROOT


def left_of(session: int) -> list[psutil.Process]:
    """Return the processes of a session that do not end."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            left += [process] if os.getsid(process.pid) == session else []
    return psutil.wait_procs(left, timeout=LIMIT_S)[1]


LOADS = ("--rate", "0.0001", "--num-requests", "2", "--prompt-tokens", "8", "--max-tokens", "4")
"""The second request is due after hours: the command is still at it when it is told to end."""


@contextlib.contextmanager
def bench(main: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run it in a session of its own, which is killed if the test fails."""
    with subprocess.Popen(
        [sys.executable, "-c", main, "bench", "storyteller", *flags, *LOADS],
        cwd=ROOT,
        env=os.environ | {"GPTSERVE_NUM_THREADS": "1", "GPTSERVE_DEVICE": "cpu", "GPTSERVE_API_KEY": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


@pytest.mark.slow
def test_a_model_is_served_for_the_time_of_the_command() -> None:
    with bench(MAIN, "--concurrency", "1") as process:
        assert process.stdout is not None
        title, _, _, row = (process.stdout.readline() for _ in range(4))
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=LIMIT_S)[1]

    assert title.startswith("storyteller at http://127.0.0.1:")
    assert row.startswith("1 at a time           2      0")
    assert (process.returncode, err) == (130, "")
    assert left_of(process.pid) == []


SIGNALLED = """
import asyncio, os, signal
signal.signal(signal.SIGINT, signal.{interrupt})
make = asyncio.events.new_event_loop
def signalled():
    os.kill(os.getpid(), signal.{name})
    return make()
asyncio.events.new_event_loop = signalled
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "interrupt"),
    [
        ("SIGINT", "default_int_handler"),
        ("SIGTERM", "default_int_handler"),
        pytest.param("SIGTERM", "SIG_IGN", id="in the background of a script"),
    ],
)
def test_a_signal_before_the_load_begins_ends_the_command_without_a_word(name: str, interrupt: str) -> None:
    with bench(SIGNALLED.format(name=name, interrupt=interrupt) + MAIN) as process:
        err = process.communicate(timeout=LIMIT_S)[1]

    assert (process.returncode, err) == (130, "")
    assert left_of(process.pid) == []


def test_a_model_that_cannot_be_served_is_said_and_status_1(run: Any) -> None:
    status, out, err = run("bench", "/no/such/model")

    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "gptserve: the server did not start"
    assert "/no/such/model" in err
