from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from bench.memory import Peak, sizes_of


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_sizes_are_those_of_the_process_and_0_once_it_has_ended() -> None:
    private, resident = sizes_of(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    assert 2**20 < private < resident
    assert sizes_of(child.pid) == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_peak_is_that_of_a_process_and_its_children_together() -> None:
    hold = "data = bytearray(b'x' * {}); print(flush=True); import sys; sys.stdin.read()"
    inner = hold.format(40 * 2**20)
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]); {hold.format(30 * 2**20)}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with psutil.Popen([sys.executable, "-c", outer], **pipes) as process:
        peak = Peak(process)
        process.stdout.readline()
        process.stdout.readline()  # both hold their part
        peak.stop()

    assert 70 * 2**20 < peak.private < peak.resident
