"""The tools that read what stands in deploy/; a test that needs one is skipped where it is not installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 100  # within that of a test


def run_tool(name: str, *arguments: str | Path, status: int = 0, **variables: str) -> str:
    """Run a tool in the repository's root with these variables alone; return all that it said."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [path, *arguments],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == status, done.stdout
    return done.stdout
