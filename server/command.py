"""What the command `gptserve` runs. It imports little until it is called, as the engine's process imports it, too."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

EXIT_TERMINATED = 143  # 128 + SIGTERM, as shells have it


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    if os.getpid() == 1:  # the first process of a container ignores signals that it does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    from gptserve.server.cli.main import main

    main()
