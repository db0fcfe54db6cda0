from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from bench.peers import Work, started

PEER = """#!/bin/sh
exec 9> "$3/held"  # its child holds it, too
sleep 600 &
echo ready
read work
echo 2.5
read none
"""


def measure_and_fail(python: Path, folder: Path) -> None:
    with started(python, "some", folder, threads=1) as compute:
        raise ValueError(compute(Work([[1, 2]], max_tokens=1)))


def test_a_peer_ends_with_all_that_it_started_when_the_benchmark_fails(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PEER)
    python.chmod(0o755)
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(ValueError, match=r"2\.5"):
            measure_and_fail(python, tmp_path)
        assert select.select([held], [], [], 10)[0] == [held]  # at its end, as nobody holds it
    finally:
        os.close(held)


def test_a_peer_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)

    with pytest.raises(RuntimeError, match="some ended with exit code 3"):
        measure_and_fail(python, tmp_path)
