"""What the command `gptserve` runs. It imports little until it is called, as the engine's process imports it, too.

Importing torch takes most of a start. So `serve` has the engine's process do that before it reads its command line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

EXIT_TERMINATED = 143  # 128 + SIGTERM, as shells have it


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    if os.getpid() == 1:  # the first process of a container ignores signals that it does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started this may ignore it: then no exit code is known
    if _serves(sys.argv[1:]):
        os.putenv("PYTHONSAFEPATH", "1")  # as cli/serving.py says, for the processes that start now
        from gptserve.engine.process.engine_process import start_ahead

        start_ahead(forks=_has_one_thread())
    from gptserve.server.cli.main import main

    main()


def _has_one_thread() -> bool:
    """Return whether this is Linux and nothing else runs in this process, as agents that come with Python may do."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _serves(arguments: Sequence[str]) -> bool:
    """Return whether this probably starts a server. If not, cli/serving.py or the exit ends the engine's process."""
    return arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments)
