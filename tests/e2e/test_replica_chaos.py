"""Servers with one database through one event of each kind; without fence and key the same checks find what is wrong.

`python -m tests.e2e.replica_chaos` does it at length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.replica_chaos import Event, Found, run
from tests.postgres_server import find_programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_programs() is None, reason="needs PostgreSQL"),
]


def disturbed(
    events: Sequence[Event], num_completions: int, folder: Path, *, num_lines: int = 20, is_unfenced: bool = False
) -> Found:
    options = {"num_lines": num_lines, "is_unfenced": is_unfenced}
    return asyncio.run(run([*events], num_completions, 2, 0, folder=folder, **options))


def test_every_completion_is_there_once_and_as_undisturbed_at_every_server(tmp_path: Path) -> None:
    found = disturbed(("kill", "cut", "restart", "stop"), 9, tmp_path)
    assert (found.wrong, found.num_compared) == ([], 9)
    assert found.num_lines == 40
    assert (found.strangers, found.twice, found.beyond, found.strange_lines, found.left) == (0, 0, 0, 0, 0)


def test_without_fence_and_key_it_finds_what_a_reaped_server_wrote(tmp_path: Path) -> None:
    found = disturbed(("cut", "cut", "cut"), 9, tmp_path, is_unfenced=True)
    assert found.strangers > 0
    assert found.twice > 0


def test_without_fence_and_key_it_finds_lines_of_a_server_that_has_lost_their_batch(tmp_path: Path) -> None:
    found = disturbed(("cut", "cut", "cut"), 0, tmp_path, num_lines=80, is_unfenced=True)
    assert found.strange_lines > 0
