"""Available memory from the files Linux keeps, with and without a container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptserve.engine.model.host_memory import available_memory_bytes

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def limit(root: Path, maximum: str, current: int, inactive_file: int) -> None:
    group = root / "sys/fs/cgroup"
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_a_limit_it_is_the_machines(root: Path) -> None:
    assert available_memory_bytes(root) == 8 * GIB
    limit(root, "max", 3 * GIB, 0)
    assert available_memory_bytes(root) == 8 * GIB


def test_a_container_has_what_its_limit_leaves_and_its_file_cache(root: Path) -> None:
    limit(root, str(4 * GIB), 3 * GIB, GIB)
    assert available_memory_bytes(root) == 2 * GIB
    limit(root, str(64 * GIB), 3 * GIB, 0)
    assert available_memory_bytes(root) == 8 * GIB


def test_this_machine_has_some() -> None:
    assert available_memory_bytes() > 0


def test_elsewhere_it_is_half_of_what_there_is(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) > 0
