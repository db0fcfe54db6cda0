"""The machine and the versions that a benchmark ran on, which every benchmark prints."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
ROOT = Path(__file__).parents[1]
LIMIT_S = 20


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the model of the CPU and how many cores this process may use; the architecture where there is no model."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None  # not Linux
    name = found[1].strip() if found else platform.processor() or platform.machine()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{name}, {num_cores} {'core' if num_cores == 1 else 'cores'}"


def versions(device: str = "cpu") -> dict[str, object]:
    """Return the device, the versions of what computes on it, torch's threads, and the commit of a clone."""
    import torch  # here, as some benchmarks do without

    numbers = {
        "gptserve": version("gptserve"),
        "commit": _told_by("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if device != "cuda":
        return {"device": cpu_name(), **numbers}
    driver = _told_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    triton = version("triton") if find_spec("triton") else None
    gpu = {"device": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda, "triton": triton}
    return {**gpu, "host": cpu_name(), **numbers}


def _told_by(*command: str) -> str | None:
    """Return the first line that a program prints, None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0] if lines and done.returncode == 0 else None


def tell(result: Mapping[str, object], output: Path | None) -> None:
    """Print the result as a line of JSON, and write it to this file, too."""
    line = json.dumps(result)
    print(line)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(line + "\n", encoding="utf-8")
