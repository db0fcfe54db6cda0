"""A change runs one seventh of the slow tests, the one that the hash of its commit chooses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sevenths

ROOT = Path(__file__).parents[1]
LIMIT_S = 60
FILE = """
import pytest
from hypothesis import settings

EXAMPLES = settings().max_examples

def test_always():
    print("ran", f"always, {EXAMPLES} examples")

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_slow(number):
    print("ran", number)
"""
ALL_SEVENTHS = """
import pytest, sys

for seventh in range(7):
    sys.modules.pop("test_some", None)
    print("seventh")
    assert pytest.main([*sys.argv[1:], "--seventh", str(seventh)]) == 0
"""
MAKE = '#!/bin/sh\necho "$@" >> made\n'


def test_each_test_is_in_one_seventh_and_no_seventh_is_empty() -> None:
    names = [f"tests/test_{i}.py::test" for i in range(200)]

    parts = [[name for name in names if sevenths.has(seventh, name)] for seventh in range(sevenths.NUM)]

    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(15 < len(part) < 45 for part in parts)


@pytest.mark.slow
def test_sevenths_share_the_slow_tests_and_each_runs_all_others(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-s", "--import-mode=prepend", "-m", "not gpu")
    command = [sys.executable, "-c", ALL_SEVENTHS, *options, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    parts = [re.findall(r"ran (.+)", part) for part in done.stdout.split("seventh\n")[1:]]
    assert sorted(number for part in parts for number in map(int, part[1:])) == list(range(40))
    assert sorted(part[0] for part in parts) == ["always, 100 examples", *["always, 25 examples"] * 6]


@pytest.mark.slow
def test_the_commit_chooses_the_seventh_which_is_named(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name, script in (("make", MAKE), ("git", "#!/bin/sh\necho 0000000a\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "commit 0000000a: with the slow tests of seventh 3 of 0 to 6\n"
    assert (tmp_path / "made").read_text() == "check\ntest-all ARGS=--seventh 3\n"
