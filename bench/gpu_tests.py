"""Run the tests that need a CUDA device, and write what came of them into a file.

    python -m bench.gpu_tests [--output bench/results/gpu-tests.json] [-k NAME ...]

Other arguments are pytest's; without a path among them FILES are run. Tests share the device but for those that need
all of its memory, which come last, one after the other. The file is written anew after each test, so it is there,
unfinished, if the run is cut off. Exits with status 1 unless tests have passed and none has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pytest

from bench.machine import ROOT, versions

FILES = (
    "tests/engine/backends/gpu/test_cuda.py",
    "tests/engine/backends/gpu/test_attention.py",
    "tests/engine/backends/gpu/test_operations.py",
    "tests/engine/backends/gpu/test_sampler.py",
    "tests/weights/test_pinned_ring.py",
)
"""All files with tests that need a GPU. Others import more packages, such as those of the server."""
MAX_PROCESSES = 12  # each holds a context on the device, about half a GB, and its tensors
PROCESS_BYTES = 4 * 2**30
"""What a process may take of the machine's memory, with the libraries of CUDA."""
MAX_ERROR = 3000  # characters, of the end
GROUPS = {"(gpu or triton) and not gpu_alone": MAX_PROCESSES, "gpu_alone": 1}
"""How many processes run the tests of each expression of marks."""


@dataclass
class Outcomes:
    """What came of each test. A plugin of pytest, which calls it by name."""

    output: Path
    machine: dict[str, object]
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """The error of each test that failed, or of the file that could not be imported."""
    skipped: list[str] = field(default_factory=list)
    has_finished: bool = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed:  # the first failure is kept: a second one may say only that the process ended
            self.failed.setdefault(name, report.longreprtext[-MAX_ERROR:])
        elif report.skipped:
            self.skipped.append(name)
        if report.when == "teardown" or report.failed:
            self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-MAX_ERROR:]

    @property
    def num_passed(self) -> int:
        return len(self.seconds.keys() - self.failed.keys() - {*self.skipped})

    def write(self) -> None:
        found = asdict(self)
        del found["output"], found["machine"]
        found["seconds"] = {name: round(self.seconds[name], 1) for name in sorted(self.seconds)}
        line = json.dumps({"benchmark": "tests", **self.machine, "num_passed": self.num_passed, **found})
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(line + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "gpu-tests.json")
    args, others = parser.parse_known_args()
    if missing := missing_for_triton():
        print(f"Triton cannot compile its kernels: {missing}", file=sys.stderr)
        return 1
    has_path = any("/" in argument or ".py" in argument for argument in others)
    outcomes, statuses = Outcomes(args.output, machine()), []
    room = psutil.virtual_memory().available // PROCESS_BYTES
    for marks, most in GROUPS.items():
        num_processes = max(1, min(most, room, os.cpu_count() or 1))
        processes = ("--numprocesses", str(num_processes), "--dist", "worksteal")
        plugins = ("-p", "no:cacheprovider", "-p", "bench.gpu_context")
        options = ("-m", marks, *processes, *plugins, "--durations", "20", "--durations-min", "5")
        statuses.append(pytest.main([*options, *others, *(() if has_path else FILES)], plugins=[outcomes]))
    outcomes.has_finished = True
    outcomes.write()
    print(
        f"{outcomes.num_passed} passed, {len(outcomes.failed)} failed, {len(outcomes.skipped)} skipped: {args.output}"
    )
    has_failed = bool(outcomes.failed) or not {*statuses} <= {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    return int(has_failed or not outcomes.num_passed)


def missing_for_triton() -> str | None:
    """Return what Triton lacks to compile a kernel's launcher, None if nothing."""
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return f"CC names no compiler: {named}" if named else "there is no C compiler, gcc or clang"
    # Debian's scheme of its own, posix_local, names a folder without headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    return None if header.exists() else f"Python's headers are missing, such as {header}"


def machine() -> dict[str, object]:
    import torch

    return versions("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    sys.exit(main())
