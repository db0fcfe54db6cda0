"""What the command `gptserve` runs. It imports nothing until it is called, as the engine's process imports it, too."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    from gptserve.server.cli.main import main

    main()
