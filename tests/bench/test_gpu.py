"""The benchmarks for GPUs: all go on after one that fails, and a model is written once. Tiny ones of a CPU stand in."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from bench import gpu, models

TINY = ("bench.decode", "--device", "cpu", "--alone", "--batch", "2", "--prompt-len", "8", "--repeats", "1")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *map(str, arguments)])
    return gpu.main()


@pytest.mark.slow
def test_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    benchmarks = {"bad": (*TINY, "--kinds", "none"), "good": (*TINY, "--max-tokens", "4", "--prefill", "16")}
    monkeypatch.setattr(gpu, "BENCHMARKS", {"tiny": benchmarks})

    assert run(monkeypatch, "--results", tmp_path / "new", "--kv-cache-bytes", str(2**24)) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "failed: bad"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["gpu-good.json"]
    found = json.loads((tmp_path / "new" / "gpu-good.json").read_text(encoding="utf-8"))
    assert (found["shape"], found["kv_cache_bytes"]) == ("tiny", 2**24)
    decoded, prompts = found["rows"]
    assert decoded["step_ms"] > 0
    assert (prompts["prompt_len"], prompts["max_tokens"]) == (16, 1)
    assert prompts["prompt_tokens_per_s"] == pytest.approx(2 * 16 / prompts["first_token_ms"] * 1e3)


def test_some_are_run_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[list[str]]()

    def run_command(command: list[str], **_options: object) -> object:
        called.append(command)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("bench.gpu.subprocess.run", run_command)

    assert run(monkeypatch, "llama-8b-idle", "gpt2-http", "--kv-cache-bytes", "100", "--results", tmp_path) == 0
    assert [command[2:5] for command in called] == [
        ["bench.serving", "--shape", "gpt2"],
        ["bench.idle", "--shape", "llama-8b"],
    ]
    assert [command[command.index("--kv-cache-bytes") + 1] for command in called] == ["50", "100"]
    with pytest.raises(SystemExit):
        run(monkeypatch, "gpt3")


@pytest.mark.parametrize("name", [name for benchmarks in gpu.BENCHMARKS.values() for name in benchmarks])
def test_each_benchmark_knows_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.subprocess.run", lambda command, **_: parse(command, monkeypatch))
    run(monkeypatch, name)


def parse(command: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", command[2:])
    args = importlib.import_module(command[2]).parse_arguments()
    assert args.output.suffix == ".json"
    assert args.kv_cache_bytes >= 2**34
    return type("Done", (), {"returncode": 0})


def test_a_model_that_is_kept_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with models.served_model("tiny", tmp_path / "kept") as folder:
        assert folder == tmp_path / "kept" / "tiny"
    monkeypatch.setattr(models, "write_served_model", lambda *_: pytest.fail("it is there"))
    with models.served_model("tiny", tmp_path / "kept") as folder:
        assert {"config.json", "model.safetensors", "vocab.json"} < {path.name for path in folder.iterdir()}
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["tiny"]


def test_a_model_that_is_not_kept_ends_with_the_context() -> None:
    with models.served_model("tiny") as folder:
        assert (folder / "model.safetensors").is_file()
    assert not folder.exists()
