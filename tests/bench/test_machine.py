from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from bench.machine import CPUINFO, ROOT, cpu_name, versions

CORES = len(os.sched_getaffinity(0))
SUFFIX = f", {CORES} core{'' if CORES == 1 else 's'}"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    return tmp_path / "cpuinfo"


def test_the_name_is_that_of_the_first_processor(cpuinfo: Path) -> None:
    cpuinfo.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9R14 \nflags\t: fpu\n\nmodel name\t: other\n"
    )

    assert cpu_name(cpuinfo) == "AMD EPYC 9R14" + SUFFIX


def test_without_a_model_it_is_the_architecture(cpuinfo: Path) -> None:
    architecture = platform.processor() or platform.machine()

    assert cpu_name(cpuinfo) == architecture + SUFFIX
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert cpu_name(cpuinfo) == architecture + SUFFIX


def test_this_machine_is_named_as_it_names_itself() -> None:
    told = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    names = re.findall(r"^model name\s*: (.*)$", told, re.MULTILINE)

    assert cpu_name().removesuffix(SUFFIX) in [name.strip() for name in names] or not names


PROGRAM = "#!/bin/sh\necho {told}\nexit {status}\n"


def put_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
    """Let git and NVIDIA's tool say something and exit with this status."""
    for name, told in {"git": "0123abc-dirty", "nvidia-smi": "580.65.06"}.items():
        (folder / name).write_text(PROGRAM.format(told=told, status=status))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_versions_have_the_commit_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()["gptserve"] == version("gptserve")
    put_programs(tmp_path, monkeypatch)
    assert versions()["commit"] == "0123abc-dirty"
    put_programs(tmp_path, monkeypatch, status=128)
    assert versions()["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert versions()["commit"] is None


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_the_commit_is_that_of_this_clone() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert str(versions()["commit"]).removesuffix("-dirty") == head.strip()


def test_on_a_gpu_the_versions_have_all_that_computes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    put_programs(tmp_path, monkeypatch)
    found = versions("cuda")

    assert (found["device"], found["driver"], found["cuda"]) == ("NVIDIA H100", "580.65.06", "13.0")
    assert found["host"] == cpu_name()
    assert found.keys() > versions().keys() | {"triton"}
