"""The machine and the versions that a benchmark ran on, which every benchmark prints."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the model of the CPU and how many cores this process may use; the architecture where there is no model."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None  # not Linux
    name = found[1].strip() if found else platform.processor() or platform.machine()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{name}, {num_cores} {'core' if num_cores == 1 else 'cores'}"


def versions() -> dict[str, object]:
    """Return the device, torch's version and threads, and Python's version."""
    import torch  # here, as some benchmarks do without

    numbers = {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}
    return {"device": cpu_name(), **numbers}


def tell(result: Mapping[str, object], output: Path | None) -> None:
    """Print the result as a line of JSON, and write it to this file, too."""
    line = json.dumps(result)
    print(line)
    if output is not None:
        output.write_text(line + "\n", encoding="utf-8")
