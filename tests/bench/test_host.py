from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_part_of_a_step_takes_time() -> None:
    command = [sys.executable, "-m", "bench.host", "--batch", "1", "2", "--context", "8", "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(rows) == 2
    for row in rows:
        assert len(row["parts_us"]) > 8
        assert all(us > 0 for us in row["parts_us"].values()), row
