"""Whether the tests notice faults: `python -m tests.mutants [NAME ...]`, or `make mutants`.

Each fault of faults.py goes into a copy of the tree, where the tests run that ought to fail: those of `make test`, then
the slow ones if those pass. A test kills a fault if it fails with it and passes in a copy without it. After a fault
that no test notices its file is broken: tests that pass even so never load it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LIBRARIES = "engine/backends/cpu/_*.so"
SOURCES = "engine/backends/cpu/csrc/"
LIMIT_S = 1800  # of the tests of a fault
TEST_LIMIT_S = 120  # of one test, as with some faults it would wait for ever
GATE = "not gpu and not triton and not slow and not clients"  # as in pyproject.toml
SLOW = "slow and not gpu and not triton and not clients"
FAILED, NO_TESTS = 1, 5  # pytest's exit statuses


class InconclusiveError(Exception):
    """A fault says nothing of the tests, and why."""


class BrokenTestsError(InconclusiveError):
    """pytest could not run the tests."""


def main() -> int:
    """Try the faults; return 1 unless every one is noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="try only the faults of these names")
    tests = parser.add_mutually_exclusive_group()
    tests.add_argument("--gate", action="store_true", help="run the tests of `make test` only")
    tests.add_argument("--all", action="store_true", help="run slow tests, too, where those pass: the default")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="how many faults to try at once")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not asked.names or fault.name in asked.names]
    markers = (GATE,) if asked.gate else (GATE, SLOW)
    num_killed = 0
    with _copy() as unchanged, ThreadPoolExecutor(asked.jobs) as threads:
        _check_imports(unchanged)
        tried = threads.map(partial(_try, markers=markers, unchanged=unchanged), faults)
        for fault, (verdict, why, seconds) in zip(faults, tried, strict=True):
            num_killed += verdict.startswith("killed")
            print(f"{verdict:13} {fault.name:28} {seconds:4.0f} s  {why}", flush=True)
    print(f"{num_killed} of {len(faults)} faults are killed")
    return int(num_killed < len(faults))


def _try(fault: Fault, markers: Sequence[str], unchanged: Path) -> tuple[str, str, float]:
    """Return whether tests notice a fault, which one or why not, and how many seconds that took."""
    began_at = time.monotonic()
    verdict, why = "survived", fault.effect
    try:
        with _copy() as copy:
            _apply(fault, copy)
            for marker in markers:
                if (failed := _failing_test(copy, fault.targets, marker)) is not None:
                    # By the name of its function: not every id can be asked for.
                    if _failing_test(unchanged, [failed.partition("[")[0]], marker) is not None:
                        raise InconclusiveError(f"fails without the fault, too: {failed}")
                    verdict, why = ("killed" if marker == GATE else "killed (slow)"), failed
                    break
            else:
                _check_loaded(fault, copy, markers)
    except InconclusiveError as error:
        verdict, why = "inconclusive", str(error)
    return verdict, why, time.monotonic() - began_at


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """Give a copy of all files that git tracks or would track, as they are now, with the compiled libraries."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [*(ROOT / name for name in listed if name), *ROOT.glob(LIBRARIES)]
    with tempfile.TemporaryDirectory(prefix="gptserve-mutant-") as folder:
        for file in files:
            if file.is_symlink() or file.exists():  # and was not deleted
                target = folder / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target, follow_symlinks=False)
        yield Path(folder)


def _check_imports(copy: Path) -> None:
    """Assert that Python imports the code of a copy wherever it runs, as child processes of tests do."""
    code = "import gptserve.engine, gptserve.server, gptserve.weights as w; print(gptserve.__file__, w.__file__)"
    command, environment = [sys.executable, "-c", code], _environment(copy)
    imported = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True).stdout
    assert imported.count(str(copy)) == 2, f"Python imports other code than that of {copy}: {imported}"


def _apply(fault: Fault, copy: Path) -> None:
    """Put a fault into a copy. Raises InconclusiveError."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if (count := text.count(fault.old)) != 1:
        raise InconclusiveError(f"does not apply: {fault.file} has the old text {count} times")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    if fault.file.startswith(SOURCES):
        for library in copy.glob(LIBRARIES):
            library.unlink()
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        built = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if not any(copy.glob(LIBRARIES)):
            raise InconclusiveError(f"{fault.file} does not compile: {built.stderr}")


def _check_loaded(fault: Fault, copy: Path, markers: Sequence[str]) -> None:
    """Raise InconclusiveError if the tests pass even where the file of a fault is no Python."""
    path = copy / fault.file
    if path.suffix == ".py":
        path.write_text("no Python\n", encoding="utf-8")
        with contextlib.suppress(BrokenTestsError):
            if all(_failing_test(copy, fault.targets, marker) is None for marker in markers):
                raise InconclusiveError(f"the tests do not load {fault.file}")


def _failing_test(copy: Path, targets: Sequence[str], marker: str) -> str | None:
    """Return the first test in a copy that fails, None if none does. Raises InconclusiveError."""
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", marker]
    command += ["--timeout", str(TEST_LIMIT_S), *targets]
    pipe, both, environment = subprocess.PIPE, subprocess.STDOUT, _environment(copy)
    run = subprocess.Popen(command, cwd=copy, env=environment, stdout=pipe, stderr=both, start_new_session=True)
    try:
        output = run.communicate(timeout=LIMIT_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise InconclusiveError(f"the tests take longer than {LIMIT_S} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a fault has left running
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    if run.returncode in (0, NO_TESTS):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
    if run.returncode != FAILED or failed is None:
        raise BrokenTestsError(f"pytest ends with {run.returncode}: {output[-500:]}")
    return failed[1]


def _environment(copy: Path) -> dict[str, str]:
    """Return an environment where Python and child processes find the code of a copy before what is installed."""
    return {**os.environ, "PYTHONPATH": str(copy)}


if __name__ == "__main__":
    sys.exit(main())
