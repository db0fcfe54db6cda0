"""The list of clients, and the table of them in the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.environments import Environment, environments

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "clients.md"


def row_of(environment: Environment) -> str:
    """Return the beginning of the row: the client's own package and its version."""
    [(name, version)] = re.findall(r"^(.+?)(?:\[.+\])?(?:==|@)([\d.]+)$", (environment.pip + environment.npm)[0])
    return f"| {name}{' (npm)' if environment.npm else ''} | {version} |"


@pytest.mark.slow
@pytest.mark.parametrize("name", environments())
def test_every_client_has_a_row_with_its_version(name: str) -> None:
    assert row_of(environments()[name]) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", environments())
def test_every_client_is_tried(name: str) -> None:
    texts = [file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py")]

    assert any(f'\nCLIENT = "{name}"\n' in text or f'\n    "{name}": (' in text for text in texts)
