"""Every Triton kernel compiles for real GPUs, and its programs fit into the smallest of them. That needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LAUNCHING = ("attention.py", "operations.py", "sampler.py")
PARTS = {"attention-bf16": 35, "attention-fp32": 30, "attention-fp16": 8, "operations": 100, "sampler": 12}
"""Those of compiled_kernels.py, which cannot be imported without Triton, and the least number of their launches."""

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is installed for Linux on x86-64 alone")


def table(folder: Path, *arguments: str) -> list[list[str]]:
    """Return the rows that compiled_kernels.py prints; nothing was compiled before."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONWARNINGS": "error"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.engine.backends.gpu.compiled_kernels", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()[1:]]


@pytest.mark.slow
def test_a_launch_of_each_kernel_compiles_for_an_h100(tmp_path: Path) -> None:
    folder = ROOT / "engine" / "backends" / "gpu"
    launched = {name for path in LAUNCHING for name in re.findall(r"kernels\.(\w+)\[", (folder / path).read_text())}
    assert len(launched) > 9
    assert {name for name, *_ in table(tmp_path, "90", "few")} == launched


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
def test_all_launches_compile_for_a_gpu(capability: str, part: str, tmp_path: Path) -> None:
    """In parts, as ptxas needs up to a minute for one."""
    rows = table(tmp_path, capability, part)
    assert len(rows) >= PARTS[part]
    assert any(int(shared) > 0 for *_, shared, _, _ in rows)
