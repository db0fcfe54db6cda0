"""What is kept of the tests that need a GPU: those of a folder of stand-ins, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_tests
from bench.gpu_tests import FILES, missing_for_triton

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
TESTS = """
import os, pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("at the end")

@pytest.mark.gpu
def test_a(): pass

@pytest.mark.triton
def test_b(): assert False, "the reason"

@pytest.mark.gpu
def test_c(broken): pass

@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_d(): assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1"

@pytest.mark.gpu
@pytest.mark.skip
def test_e(): pass

def test_f(): assert False, "it needs no GPU"

@pytest.mark.gpu
def test_g():
    import torch
    def fail(): raise torch.AcceleratorError("CUDA error: the reason")
    torch.cuda.is_available, torch.cuda.synchronize = lambda: True, fail

@pytest.mark.gpu
def test_h():
    import torch
    assert not torch.cuda.is_available(), "another process than that of test_g"
"""


def found_of(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the tests there; return the status and what the file has."""
    (folder / "test_some.py").write_text(TESTS)
    output = folder / "new" / "found.json"
    options = ("--output", output, "--rootdir", folder, "--numprocesses", "1")  # so that tests follow each other in it
    command = [sys.executable, "-m", "bench.gpu_tests", *options, folder, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    print(done.stdout, done.stderr)  # noqa: T201 - pytest shows it if the test fails
    return done.returncode, found


@pytest.mark.slow
def test_each_outcome_is_kept(tmp_path: Path) -> None:
    status, found = found_of(tmp_path)

    assert status == 1
    assert (found["num_passed"], found["has_finished"]) == (3, True)
    failed = {name.rpartition("::")[2]: error for name, error in found["failed"].items()}
    assert failed.keys() == {"test_b", "test_c", "test_g"}
    assert "the reason" in failed["test_b"]
    assert "CUDA error: the reason" in failed["test_g"]
    assert "at the end" in failed["test_c"]
    assert [name.rpartition("::")[2] for name in found["skipped"]] == ["test_e"]
    assert {"gptserve", "torch", "device"} < found.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("test_d", 0), ("test_f", 1)])
def test_it_succeeds_if_tests_have_passed_and_none_has_failed(name: str, status: int, tmp_path: Path) -> None:
    assert found_of(tmp_path, "-k", name)[0] == status


@pytest.mark.slow
def test_all_files_are_named_that_have_tests_for_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu or triton", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert {line.partition("::")[0] for line in listed.splitlines() if "::" in line} == {*FILES}


def test_what_triton_lacks_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, header = tmp_path / "clang", tmp_path / "Python.h"
    monkeypatch.setattr(gpu_tests.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert missing_for_triton() == "there is no C compiler, gcc or clang"
    compiler.touch(0o755)
    assert missing_for_triton() == f"Python's headers are missing, such as {header}"
    header.touch()
    assert missing_for_triton() is None
    monkeypatch.setenv("CC", "icx")
    assert missing_for_triton() == "CC names no compiler: icx"
