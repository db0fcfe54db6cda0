"""`gptserve state`: moves stored completions between a folder and a database. `main.py` calls it."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TypeVar

from gptserve.server.cli.errors import CommandError
from gptserve.server.core.settings_checks import SettingsError, check_state_url

URL_VARIABLE = "GPTSERVE_STATE_URL"


Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_state_command(commands: argparse._SubParsersAction[Parser]) -> Parser:
    """Add the command `gptserve state`."""
    parser = commands.add_parser(
        "state",
        help="move stored completions from a folder into a database, or back",
        description="Copy all stored completions, files and batches of a --state-dir into an empty database for "
        "--state-url, or back, while no server uses either.",
    )
    parser.add_argument("DIRECTION", choices=["import", "export"], help="into the database, or out of it")
    parser.add_argument("FOLDER", type=Path, help="a --state-dir: to import from, or a new one to export into")
    parser.add_argument("--state-url", metavar="URL", help=f"the database (default: {URL_VARIABLE})")
    return parser


def move_state(direction: str, folder: Path, url: str | None) -> str:
    """Copy all completions to the other store; return one line about it. Raises SettingsError or CommandError."""
    if url is None:
        raise SettingsError(f"state {direction} needs --state-url or {URL_VARIABLE}")
    check_state_url(url, None)

    from gptserve.server.jobs.store import JobStoreError
    from gptserve.server.stores import export_folder, import_folder

    try:
        moving = import_folder(folder, url) if direction == "import" else export_folder(url, folder)
        num_completions, num_unfinished = asyncio.run(moving)
    except JobStoreError as error:
        raise CommandError(str(error)) from error
    return f"{direction}ed {num_completions} completions, {num_unfinished} of them to go on"
