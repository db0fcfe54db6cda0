"""The help of `gptserve serve`."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from gptserve.server.cli.flags import EPILOG, GROUPS, add_flags
from gptserve.server.settings import server_options
from gptserve.server.settings_sources import load_settings


def test_the_help_of_serve_has_every_option_once_in_groups(run: Any) -> None:
    status, out, _ = run("serve", "--help")

    assert status == 0
    assert re.findall(r"^  --([\w-]+)", out, re.MULTILINE) == [option.name for option in server_options()]
    for name, title in GROUPS.items():
        assert f"\n{title}:\n  --{name}" in out


@pytest.mark.parametrize("example", re.findall(r"gptserve serve(.*?)  ", EPILOG))
def test_the_examples_of_the_help_are_right(example: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("MODEL", nargs="?")
    add_flags(parser)

    flags = vars(parser.parse_args(example.split()))
    flags.pop("MODEL")

    assert len(load_settings(flags, {}).sources) == len(flags)
