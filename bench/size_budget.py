"""How many lines of code each file has, and whether any file or function has outgrown its budget.

    python -m bench.size_budget

Counts lines that hold code: no blank lines, comments or docstrings. Prints a table and one JSON line; exits with
status 1 when a file has over 300 lines or a function over 60. GPU kernels (kernels/*.py) may be longer.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("weights", "engine", "server")
DOOR = "gptserve"  # besides links to the packages it has files of its own
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
TARGET_FUNCTION_LINES = 40
EXEMPT = "kernels/*.py"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> int:
    root = Path(__file__).parents[1]
    totals, too_large = dict.fromkeys((*PACKAGES, DOOR), 0), []
    print(f"{'file':<44} {'lines':>6}  longest function")
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    for path in sorted([*paths, *(root / DOOR).glob("*.py")]):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        lines = code_lines(source)
        if not lines:
            continue
        totals[name.partition("/")[0]] += len(lines)
        longest, function = max(function_sizes(source, lines), default=(0, "-"))
        mark = f"  over {TARGET_FUNCTION_LINES}" if longest > TARGET_FUNCTION_LINES else ""
        print(f"{name:<44} {len(lines):>6}  {longest:>3} {function}{mark}")
        if not path.match(EXEMPT):
            if len(lines) > MAX_FILE_LINES:
                too_large.append(f"{name} has {len(lines)} lines of code, {MAX_FILE_LINES} are allowed")
            if longest > MAX_FUNCTION_LINES:
                too_large.append(f"{name}: {function} has {longest} lines of code, {MAX_FUNCTION_LINES} are allowed")
    print(json.dumps({"code_lines": totals, "total": sum(totals.values())}))
    print(*too_large, sep="\n", end="\n" if too_large else "", file=sys.stderr)
    return 1 if too_large else 0


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone is documentation, at the head of a body or below the field it describes.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def function_sizes(source: str, lines: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the lines of code and the name of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield len(lines.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1))), node.name


if __name__ == "__main__":
    sys.exit(main())
