"""A child process that ends with its parent, and what its end says.

Torch-free. engine/process/process_client.py and engine/parallel/ranks.py use it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.context import ForkProcess, SpawnProcess

from gptserve.engine.errors import DeathKind

PR_SET_PDEATHSIG = 1  # linux/prctl.h

SPINS = "2000"
"""How often a thread of libgomp looks for work before it sleeps: some 30 to 100 us, as in csrc/team.cpp."""

ENGINE_NAME = "gptserve-engine"
"""The name of the engine's process."""
RANK_DIED = 64
"""Plus a rank: the exit code of an engine whose rank died."""
MAX_RANKS = 64  # no machine has as many GPUs; greater codes are of others, such as 255


def start_deaf(process: SpawnProcess | ForkProcess) -> None:
    """Start `process` with SIGINT and SIGTERM blocked for its whole life."""
    signals = {signal.SIGINT, signal.SIGTERM}
    if isinstance(process, SpawnProcess):
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # otherwise `start` does it, which unblocks these signals
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent dies. Raises EOFError if the parent is dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise EOFError("the parent died before prctl")


def limit_spinning() -> None:
    """Have torch's threads sleep soon where they wait for each other, unless the environment says how they wait.

    Call it before torch is imported: libgomp then reads it, and child processes inherit it. Without a C++ compiler at
    the installation torch's threads compute steps. By default they spin for milliseconds, and beside busy processes
    keep those from running that they wait for. numpy's threads would spin for a tenth of a second once it is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if os.uname().machine == "x86_64":  # elsewhere torch itself may use OpenBLAS
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def describe_exit(name: str, code: int | None) -> tuple[str, DeathKind]:
    """Return how the process called `name` ended."""
    if code is not None and RANK_DIED < code < RANK_DIED + MAX_RANKS:
        return f"{name} ended because its rank {code - RANK_DIED} died", DeathKind.EXITED
    if code is None or code >= 0:
        return f"{name} ended with exit code {code}", DeathKind.EXITED
    reason = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"{name} was killed by signal {-code} ({signal.strsignal(-code)}){reason}", DeathKind.KILLED
