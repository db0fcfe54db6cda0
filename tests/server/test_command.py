"""The command as the first process of a container, which the system does not end by signals that it does not handle."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

from tests.server.serving import LIMIT_S, ROOT

# Sends SIGTERM as soon as the command line is imported, long before it has parsed anything.
PROGRAM = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "gptserve.server.cli":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from gptserve.server.command import main
sys.argv[1:] = ["--version"]
main()
"""
ALONE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def run(*before: str) -> int:
    command = [*before, sys.executable, "-c", PROGRAM]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=LIMIT_S).returncode


def test_sigterm_ends_the_first_process_of_a_container_while_it_imports() -> None:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine gives no namespace of processes")
    assert run(*ALONE) == 143


def test_sigterm_ends_any_other_process_as_ever() -> None:
    assert run() == -signal.SIGTERM
