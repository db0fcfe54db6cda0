"""Writes the table of docs/models.md, a row for each of FAMILIES: `python -m tests.weights.families.models_table`."""

from __future__ import annotations

import re
from pathlib import Path

from gptserve.weights.families import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = "| `model_type` | Models |\n|---|---|\n"


def table() -> str:
    """Return the table as it ought to be."""
    return HEAD + "".join(f"| `{family.model_type}` | {family.models} |\n" for family in FAMILIES.values())


def with_table(page: str) -> str:
    """Return the page with that table in place of its own."""
    found, num = re.subn(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: table(), page)
    assert num == 1
    return found


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
