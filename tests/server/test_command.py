"""The command before it reads its command line: signals in a container, and the start of the engine's process."""

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


WITHOUT_CHILDREN = """
import multiprocessing, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "gptserve.server.cli":
            (child,) = multiprocessing.active_children()
            child.kill()
            child.join()
            print(child.exitcode)
            sys.exit(7)
sys.meta_path.insert(0, Finder())
from gptserve.server.command import main
main()
"""


def test_the_end_of_the_engines_process_is_seen_where_whoever_starts_the_command_ignores_ends() -> None:
    command = [sys.executable, "-c", WITHOUT_CHILDREN, "serve"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{-signal.SIGKILL}\n", "")


# Shows the engine's process as soon as the command line is imported, how it began, and what its children have.
STARTED = """
import multiprocessing, subprocess, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "gptserve.server.cli":
            for child in multiprocessing.active_children():
                safe_path = subprocess.run(["printenv", "PYTHONSAFEPATH"], stdout=subprocess.PIPE).stdout
                print(type(child).__name__, child.name, safe_path)
            sys.exit(7)
sys.meta_path.insert(0, Finder())
from gptserve.server.command import main
main()
"""


STARTS = f"{'ForkProcess' if sys.platform == 'linux' else 'SpawnProcess'} gptserve-engine b'1\\n'\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve",), STARTS),
        (("serve", "model.gguf", "--port", "8001"), STARTS),
        (("serve", "--help"), ""),
        (("serve", "-h"), ""),
        (("--version",), ""),
        (("config", "serve"), ""),
        ((), ""),
    ],
    ids=str,
)
def test_serve_starts_the_engines_process_before_it_imports_the_command_line(
    arguments: tuple[str, ...], expected: str
) -> None:
    """It imports nothing from the current folder, which may be a model's, and ends with the command."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, expected, "")


def test_engines_process_is_no_copy_of_a_process_with_another_thread() -> None:
    program = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + STARTED
    done = subprocess.run(
        [sys.executable, "-c", program, "serve"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "SpawnProcess gptserve-engine b'1\\n'\n", "")
