"""How the Makefile sets up .venv, with a stand-in for Python that only makes files."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LIMIT_S = 60
SOURCES = ("engine/backends/cpu/csrc/attention.cpp", "engine/backends/cpu/csrc/team.h")
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> log
case "$*" in
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg"
    test -e broken && exit 1
    printf '#!/bin/sh\\necho gptserve "$@" >> log' > "$3/bin/gptserve" && chmod +x "$3/bin/gptserve"
    touch "$3/bin/pip" ;;
  "-m pip"*) ls engine/backends/cpu/* >> log ;;
  "-m bench."*) test ! -e fails || ! grep -qx "$2" fails ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the Makefile, what it depends on, and the stand-in as ./python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for source in SOURCES:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).touch()
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(tree: Path, *arguments: str) -> tuple[bool, list[str]]:
    """Run make, which is make serve without a target; return whether it succeeded and what was called, -c aside."""
    done = run_make(tree, *(arguments or ("serve",)))
    return done.returncode == 0, [line for line in (tree / "log").read_text().splitlines() if line[:2] != "-c"]


def run_make(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tree / "log").unlink(missing_ok=True)
    environment = {"PATH": os.environ["PATH"]}  # without what a make that runs these tests leaves in it
    command = ["make", *arguments, "PYTHON=./python"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def put_tools(tree: Path, *broken: str) -> None:
    """Give .venv the tools of development; each logs how it is called, those that are broken fail."""
    (tree / ".venv" / "bin").mkdir(parents=True)
    for name in ("ruff", "mypy", "lint-imports", "codespell", "pytest"):
        tool = tree / ".venv" / "bin" / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >> log\nexit {int(name in broken)}\n')
        tool.chmod(0o755)


def test_an_environment_that_stopped_half_way_is_begun_again(tree: Path) -> None:
    (tree / "broken").touch()

    first = make(tree)
    left = (tree / ".venv").exists()
    second = make(tree)
    (tree / "broken").unlink()
    succeeded, called = make(tree)

    assert first == second == (False, ["-m venv .venv"])
    assert not left
    assert succeeded
    assert (called[0], called[-1]) == ("-m venv .venv", "gptserve serve")


def test_the_environment_is_made_once(tree: Path) -> None:
    make(tree)

    assert make(tree) == (True, ["gptserve serve"])


def test_an_installation_leaves_no_old_library_to_write_into(tree: Path) -> None:
    make(tree)
    (tree / "engine" / "backends" / "cpu" / "_native.cpython-311-x86_64-linux-gnu.so").touch()
    (tree / ".venv" / "serving").unlink()

    succeeded, (installed, *rest) = make(tree)

    assert succeeded
    assert installed.startswith("-m pip ")
    assert installed.endswith(" --editable .")
    assert [line for line in rest if line and line[-1] != ":"] == ["attention.cpp", "team.h", "gptserve serve"]


def test_torch_may_come_from_an_index_of_other_builds(tree: Path) -> None:
    succeeded, [_, installed, *_] = make(tree, "serve", "TORCH_INDEX_URL=https://index.example/cpu")

    assert succeeded
    assert "--constraint constraints.txt --extra-index-url https://index.example/cpu --editable ." in installed


@pytest.mark.parametrize("source", SOURCES)
def test_a_changed_source_is_compiled_anew(tree: Path, source: str) -> None:
    make(tree)
    later = (tree / ".venv" / "serving").stat().st_mtime + 10
    os.utime(tree / source, (later, later))

    succeeded, (installed, *_) = make(tree)

    assert succeeded
    assert installed.startswith("-m pip ")


CHECKS = ["ruff check .", "ruff format --check .", "mypy", "lint-imports", "-m bench.size_budget", "codespell"]


def test_check_runs_every_tool(tree: Path) -> None:
    put_tools(tree)

    succeeded, called = make(tree, "check")

    assert succeeded
    assert called[-len(CHECKS) :] == CHECKS


def test_check_goes_on_after_a_tool_that_fails_and_names_all_that_did(tree: Path) -> None:
    put_tools(tree, "ruff", "lint-imports")

    done = run_make(tree, "check")

    assert done.returncode != 0
    assert (tree / "log").read_text().splitlines()[-len(CHECKS) :] == CHECKS
    assert "make check failed: ruff check .; ruff format --check .; lint-imports\n" in done.stderr


def test_format_repairs_then_formats(tree: Path) -> None:
    put_tools(tree)

    succeeded, called = make(tree, "format")

    assert succeeded
    assert called[-2:] == ["ruff check --fix .", "ruff format ."]


@pytest.mark.parametrize("failing", [[], ["pytest"]])
def test_all_of_the_night_runs_whatever_fails(tree: Path, failing: list[str]) -> None:
    put_tools(tree, *failing)
    (tree / "tests").mkdir()
    (tree / "tests" / "sanitize.sh").write_text("#!/bin/sh\necho sanitize >> log\n")
    (tree / "tests" / "sanitize.sh").chmod(0o755)

    succeeded, called = make(tree, "test-nightly")

    tests = ["--numprocesses", "-m not gpu and not triton and not clients"]
    assert [line for line in called if line.startswith("pytest ") and all(part in line for part in tests)]
    assert called[-3:] == ["sanitize", "-m bench.chaos", "-m tests.mutants"]
    assert succeeded is not bool(failing)


ON_A_GPU = [
    "-m bench.gpu_tests",
    "-m bench.chaos --device cuda --output bench/results/gpu-chaos.json",
    "-m bench.gpu",
]


@pytest.mark.parametrize("failing", [[], ["bench.gpu_tests"], ["bench.gpu_tests", "bench.chaos"], ["bench.gpu"]])
def test_all_that_needs_a_gpu_runs_whatever_fails(tree: Path, failing: list[str]) -> None:
    (tree / "fails").write_text("".join(f"{module}\n" for module in failing))

    succeeded, called = make(tree, "gpu")

    assert called[-len(ON_A_GPU) :] == ON_A_GPU
    assert succeeded is not bool(failing)


@pytest.mark.parametrize(
    ("target", "module"), [("gpu-test", "gpu_tests"), ("gpu-chaos", "chaos"), ("gpu-bench", "gpu")]
)
def test_each_part_of_what_needs_a_gpu_runs_alone_with_arguments(tree: Path, target: str, module: str) -> None:
    succeeded, called = make(tree, target, "ARGS=some")

    assert succeeded
    assert called[-1].startswith(f"-m bench.{module} ")
    assert called[-1].endswith(" some")
