"""Usable CPUs from the affinity and from the files of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptserve.engine.runner.host_cpus import usable_cpus


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 CPUs without a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def join_group(root: Path, *lines: str) -> None:
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def limit(root: Path, group: str, quota: str, period: int = 100_000) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{quota} {period}\n")


def limit_v1(root: Path, group: str, quota: int, period: int = 100_000) -> None:
    folder = root / "sys/fs/cgroup/cpu" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_without_a_limit_it_is_the_affinity(root: Path) -> None:
    assert usable_cpus(root) == 64
    join_group(root, "0::/")
    limit(root, "", "max")
    assert usable_cpus(root) == 64


@pytest.mark.parametrize(("quota", "cpus"), [("200000", 2), ("250000", 2), ("50000", 1), ("9900000", 64)])
def test_a_containers_quota_counts_in_whole_cpus_and_at_least_one(root: Path, quota: str, cpus: int) -> None:
    join_group(root, "0::/")
    limit(root, "", quota)
    assert usable_cpus(root) == cpus


def test_the_period_of_a_quota_counts(root: Path) -> None:
    join_group(root, "0::/")
    limit(root, "", "200000", period=50_000)
    assert usable_cpus(root) == 4


def test_the_least_of_a_group_and_those_around_it_holds(root: Path) -> None:
    join_group(root, "0::/system.slice/gptserve.service")
    limit(root, "system.slice", "300000")
    limit(root, "system.slice/gptserve.service", "500000")
    limit(root, "elsewhere", "100000")
    assert usable_cpus(root) == 3
    limit(root, "system.slice/gptserve.service", "200000")
    assert usable_cpus(root) == 2


def test_the_first_version_of_control_groups_is_read(root: Path) -> None:
    join_group(root, "7:blkio:/", "4:cpu,cpuacct:/docker/abc", "0::/")
    limit_v1(root, "", -1)
    assert usable_cpus(root) == 64
    limit_v1(root, "", 400_000)  # as a container sees its own group, whose path is the host's
    assert usable_cpus(root) == 4
    limit_v1(root, "docker/abc", 200_000)
    assert usable_cpus(root) == 2


def test_the_path_of_a_host_may_lead_out_of_what_is_mounted(root: Path) -> None:
    join_group(root, "0::/../../outside")
    limit(root, "", "200000")
    assert usable_cpus(root) == 2


def test_a_file_that_makes_no_sense_is_no_limit(root: Path) -> None:
    join_group(root, "0::/")
    limit(root, "", "nonsense")
    assert usable_cpus(root) == 64
    limit(root, "", "0")
    assert usable_cpus(root) == 64


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has affinities")
def test_the_affinity_of_this_process_counts() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= usable_cpus() <= len(allowed)
