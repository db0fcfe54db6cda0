"""A confined process can do what a worker does, and nothing that would harm others; the same code can where it is not.

Each thing is tried in a process of its own: with Landlock and the filter of calls, with each alone, and without both.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from gptserve.weights import confinement
from gptserve.weights.confinement import Confinement, available
from gptserve.weights.system_calls import DENIED, LOOKED_AT, names, numbers_of

LIMIT_S = 60
HAS = available()
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
Held = Literal["both", "landlock", "filter", "nothing"]

TRY = """
import ctypes, os, socket, sys, threading
from pathlib import Path
from gptserve.weights import confinement
folder, held, code = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if held == "filter":
    confinement._hold = lambda *_: False
if held == "landlock":
    confinement._filter = lambda *_: False
libc = ctypes.CDLL(None, use_errno=True)
if held != "nothing":
    confinement.confine([folder / "readable"])
try:
    exec(code)
except PermissionError as fault:
    os.write(1, b"denied")
else:
    os.write(1, b"done")
"""

FILES = {
    "read another file": "open(folder / 'secret').read()",
    "read the server's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "list another folder": "os.listdir(folder)",
}
"""What Landlock alone denies."""
CHANGES = {
    "write": "open(folder / 'readable/file', 'w')",
    "append": "open(folder / 'readable/file', 'a')",
    "empty as it is opened to read": "os.open(folder / 'readable/file', os.O_RDONLY | os.O_TRUNC)",
    "make a file": "os.open(folder / 'readable/new', os.O_CREAT | os.O_WRONLY)",
    "truncate": "os.truncate(folder / 'readable/file', 0)",
    "unlink": "os.unlink(folder / 'readable/file')",
    "rename": "os.rename(folder / 'readable/file', folder / 'readable/other')",
    "link": "os.link(folder / 'readable/file', folder / 'readable/other')",
    "make a link": "os.symlink('file', folder / 'readable/other')",
    "make a folder": "os.mkdir(folder / 'readable/other')",
    "remove a folder": "os.rmdir(folder / 'empty')",
    "run a program": "os.execv(sys.executable, [sys.executable, '-c', 'import os; os.write(1, b\"done\")'])",
}
"""What both deny."""
CALLS = {
    "connect": "socket.create_connection(('127.0.0.1', int((folder / 'readable/port').read_text()))).close()",
    "connect by IPv6": "socket.socket(socket.AF_INET6).close()",
    "send datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()",
    "open a socket of this machine": "socket.socket(socket.AF_UNIX).close()",
    "start a process": "os.fork() or os._exit(0)",
    "change rights": "os.chmod(folder / 'readable/file', 0o600)",
    "change times": "os.utime(folder / 'readable/file')",
    "signal others": "os.kill(os.getppid(), 0)",
    "signal its group": "os.kill(0, 0)",
    "have a file signal others": "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "limit others": "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "share memory": "libc.shmget(0, 4096, 0) >= 0 or os.strerror(ctypes.get_errno())\n"
    "if ctypes.get_errno() == 1: raise PermissionError",
}
"""What the filter alone denies."""
ALLOWED = {
    "read its files": "assert (folder / 'readable/file').read_text() == 'text'",
    "read what a link leads to": "assert (folder / 'readable/link').read_text() == 'apart'",
    "import": "import tokenizers, llguidance, numpy, jinja2.ext, tiktoken, sqlite3, zoneinfo",
    "import what others of this project import later": "import gptserve.weights.families.gpt2",
    "tell the time": "import time; time.strftime('%c %Z')",
    "draw random numbers": "os.urandom(8); open('/dev/urandom', 'rb').read(8)",
    "read its own size": "open('/proc/self/statm').read()",
    "signal itself": "import signal; os.kill(os.getpid(), 0); signal.raise_signal(signal.SIGCONT)",
    "limit itself": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "start a thread": "threading.Thread(target=int).start()",
    "talk to its caller": "a, b = socket.socketpair(); a.sendall(b'x') if False else os.write(a.fileno(), b'x')",
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with one that may be read, and a port that listens."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blob").write_text("apart")
    (tmp_path / "readable").mkdir()
    (tmp_path / "readable/file").write_text("text")
    (tmp_path / "readable/link").symlink_to("../blob")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "readable/port").write_text(str(server.getsockname()[1]))
        yield tmp_path


def tried(folder: Path, held: Held, code: str) -> str:
    if (held in ("both", "landlock") and not HAS.landlock) or (held in ("both", "filter") and not HAS.filters_calls):
        pytest.skip(f"this system has no {'Landlock' if not HAS.landlock else 'seccomp'}")
    command = [sys.executable, "-P", "-c", TRY, str(folder), held, code]
    done = subprocess.run(
        command, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True
    )
    assert done.stderr == ""
    return done.stdout


def test_one_of_both_is_tested_on_linux() -> None:
    assert sys.platform != "linux" or HAS.landlock or HAS.filters_calls


# The filter by itself denies changes and calls, below.
@pytest.mark.parametrize(
    "code",
    [*FILES.values(), *(pytest.param(c, marks=pytest.mark.slow) for c in (*CHANGES.values(), *CALLS.values()))],
)
def test_both_deny_what_a_process_could_do_without(folder: Path, code: str) -> None:
    assert tried(folder, "both", code) == "denied"
    assert (folder / "readable/file").read_text() == "text"
    assert tried(folder, "nothing", code) == "done"


@pytest.mark.some(4)
@pytest.mark.parametrize("code", [*FILES.values(), *CHANGES.values()])
def test_landlock_denies_files_by_itself(folder: Path, code: str) -> None:
    assert tried(folder, "landlock", code) == "denied"
    assert (folder / "readable/file").read_text() == "text"


@pytest.mark.some(6)
@pytest.mark.parametrize("code", [*CHANGES.values(), *CALLS.values()])
def test_the_filter_denies_changes_and_calls_by_itself(folder: Path, code: str) -> None:
    assert tried(folder, "filter", code) == "denied"
    assert (folder / "readable/file").read_text() == "text"


@pytest.mark.some(3)
@pytest.mark.parametrize("code", ALLOWED.values())
def test_a_confined_process_can_do_what_a_worker_does(folder: Path, code: str) -> None:
    assert tried(folder, "both", code) == "done"


@pytest.mark.skipif(HAS.landlock < confinement.NETWORK_ABI, reason="needs a Landlock that knows TCP")
def test_landlock_denies_tcp_by_itself(folder: Path) -> None:
    assert tried(folder, "landlock", CALLS["connect"]) == "denied"


def test_calls_that_later_kernels_have_are_unknown(folder: Path) -> None:
    code = "libc.syscall(460, 0) == -1 and os.strerror(ctypes.get_errno()) == 'Function not implemented' or os._exit(9)"
    assert tried(folder, "filter", code) == "done"


@pytest.mark.parametrize(
    ("landlock", "files"),
    [
        (0, "there is no Landlock, so they can read what the server's user can"),
        (7, "Landlock (version 7) lets them read their own files only"),
    ],
)
@pytest.mark.parametrize(
    ("filters_calls", "calls"),
    [
        (False, "there is no seccomp, so they can open sockets"),
        (True, "seccomp keeps them from sockets, programs and changes of files"),
    ],
)
def test_what_holds_and_what_is_missing_is_told(landlock: int, files: str, filters_calls: bool, calls: str) -> None:
    assert str(Confinement(landlock, filters_calls)) == f"{files}; {calls}"


def test_a_machine_without_numbers_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert available() == confinement.confine() == Confinement(0, filters_calls=False)


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernel(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip("there are no headers of the kernel")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    numbers = numbers_of(machine)
    assert numbers is not None
    assert {name: int(found[name]) for name in numbers.of} == numbers.of
    old = set(names(DENIED + LOOKED_AT)) - set(numbers.of)
    assert not old & set(found)
    assert len(numbers.of) > 100
