from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptserve.server.cli import doctor
from gptserve.weights.confinement import Confinement, available


@pytest.mark.slow
def test_a_machine_that_is_well_gets_status_0(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTSERVE_API_KEY", "sk-secret")
    status, out, err = run("doctor", "--device", "cpu", "--num-threads", "1", "--max-model-len", "128")

    assert (status, err) == (0, "")
    assert "sk-secret" not in out
    lines = out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert f"workers: {available()}" in out
    parts = [line.split()[1] for line in lines if line.startswith("ok") and "workers:" not in line]
    assert parts[:5] == ["versions:", "settings:", "model:", "kernels:", "memory:"]
    assert "context of 128 tokens" in out
    assert lines[-1].startswith("ok    request: http://127.0.0.1:")


def test_a_model_that_cannot_be_served_is_a_fail_and_status_1(run: Any) -> None:
    status, out, _ = run("doctor", "/no/such/model")

    assert status == 1
    assert out.splitlines()[-1].startswith("fail  the model cannot be served: gptserve: ")
    assert "/no/such/model" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("held", "verdict"),
    [
        (Confinement(7, filters_calls=True), "ok"),
        (Confinement(0, filters_calls=True), "warn"),
        (Confinement(1, filters_calls=False), "warn"),
    ],
)
def test_workers_that_are_not_confined_are_told(held: Confinement, verdict: str) -> None:
    assert doctor._workers(held) == (verdict, f"workers: {held}")


@pytest.mark.parametrize(
    ("product", "verdict", "why"),
    [
        ("native", "ok", "native, the fastest for this device"),
        ("native_coded", "ok", "native_coded, the fastest for this device"),
        ("onednn", "warn", "their library is missing"),
        ("torch_coded", "warn", "their library is missing"),
    ],
)
def test_slower_products_are_explained(product: str, verdict: str, why: str) -> None:
    found, text = doctor._kernels({"device": "cpu", "product": product})
    assert found == verdict
    assert why in text


def test_scarce_memory_is_a_warning(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    for free, verdict in (("1048576", "ok"), ("104857", "warn")):
        meminfo.write_text(f"MemTotal:  1048577 kB\nMemFree:  1 kB\nMemAvailable:   {free} kB\n")
        assert doctor._memory(2**30, meminfo)[0] == verdict
    assert doctor._memory(2**29, tmp_path / "none") == ("ok", "memory: the engine's process takes 0.50 GiB")


def test_several_machines_are_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTSERVE_CLUSTER_KEY", "0123456789abcdef")
    nodes = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")

    assert run("doctor", *nodes) == (2, "", "gptserve doctor: doctor examines one machine, got nnodes 2\n")
