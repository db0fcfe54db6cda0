"""The help of `gptserve serve`."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from gptserve.server.cli.flags import EPILOG, GROUPS, add_flags
from gptserve.server.core.settings import server_options
from gptserve.server.core.settings_sources import load_settings


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


@pytest.mark.parametrize(
    "flags",
    [
        ("--served-model-name", "a", "b", "c"),
        ("--served-model-name", "a", "--served-model-name", "b", "c"),
        ("--served-model-name", "a", "--served-model-name=b", "--port", "9000", "--served-model-name", "c"),
    ],
)
@pytest.mark.parametrize("model", [("a-model",), ("--model", "a-model")])
def test_a_model_may_have_several_names_after_one_flag(
    run: Any, model: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    status, out, err = run("config", *model, *flags)

    assert (status, err) == (0, "")
    assert re.search(r"served-model-name.*a, b, c", out)


def test_a_name_for_each_flag_leaves_the_embedded_model(run: Any) -> None:
    status, out, _ = run("config", "--served-model-name", "a", "--served-model-name", "b")

    assert status == 0
    assert re.search(r"served-model-name.*a, b", out)
