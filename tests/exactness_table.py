"""The rows of docs/dev/exactness.md: printed by the tests, put into the page by `python -m tests.exactness_table`.

A row says how many results were compared along an axis and how many of them differed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dev" / "exactness.md"
SOURCES = ("tests/engine/test_exactness.py", "tests/e2e/test_whole_path.py")
HEAD = "| {kind} | compared | different |\n|---|---|---|"


def compare(axis: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Print the row of an axis and assert that nothing differs along it."""
    assert _print_row("axis", axis, found, expected) == 0


def contrast(control: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Print the row of a negative control and assert that most results differ: the comparison can fail."""
    assert _print_row("control", control, found, expected) > len(expected) // 2


def _print_row(kind: str, name: str, found: Mapping[str, object], expected: Mapping[str, object]) -> int:
    assert found.keys() == expected.keys()
    different = sum(found[key] != expected[key] for key in expected)
    print(f"{kind} | {name} | {len(expected)} | {different} |")  # noqa: T201 - what `main` reads, and `pytest -rP` shows
    return different


def main() -> None:
    """Run the tests and write what they print between the marks of the page."""
    own = f"--deselect={SOURCES[0]}::test_the_page_has_every_axis_and_no_difference"  # it is yet to be written
    command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", "-m", "not gpu", own, *SOURCES]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    page = PAGE.read_text(encoding="utf-8")
    for kind in ("axis", "control"):
        before, begin, rest = page.partition(f"<!-- {kind} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        found = re.findall(rf"^{kind} (\| (.+) \| \d+ \| \d+ \|)$", printed, re.M)
        rows = {name: row for row, name in found}.values()  # the last test of a name compares the most
        assert end, f"the page has no place for the kind {kind}"
        assert rows, f"no test printed a row of the kind {kind}"
        page = "\n".join([before + begin.rstrip(), HEAD.format(kind=kind.capitalize()), *rows, end + after])
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
