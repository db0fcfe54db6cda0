from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest

from bench.machine import CPUINFO, cpu_name

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
