"""Files of weights that are read ahead: which, how much of them, and that nothing fails by it."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.process import factory
from gptserve.engine.runner import read_ahead as reading
from gptserve.engine.runner.memory_ahead import take_populated
from gptserve.engine.runner.read_ahead import read_ahead
from gptserve.weights.source import EMBEDDED_MODEL, resolve_model

FOLDER = resolve_model(EMBEDDED_MODEL)
WEIGHTS = FOLDER / "model.safetensors"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that the system has sent to the null device, by the names of their files."""
    found, send = Counter[str](), os.sendfile

    def noted(target: int, source: int, start: int, count: int) -> int:
        assert os.readlink(f"/proc/self/fd/{target}") == os.devnull
        name = os.readlink(f"/proc/self/fd/{source}")
        assert start == found[name]
        found[name] += (num := send(target, source, start, count))
        return num

    monkeypatch.setattr(os, "sendfile", noted)
    return found


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "gptserve-files":
            thread.join()


def test_all_bytes_are_read_once(sent: Counter[str]) -> None:
    read_ahead(FOLDER)
    wait_for_thread()

    assert sent == {str(WEIGHTS.resolve()): WEIGHTS.stat().st_size}


def test_shards_are_read_one_after_the_other(sent: Counter[str], tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"{number}.weight": torch.zeros(1000)}, tmp_path / name)
    weight_map = {f"{number}.weight": name for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read_ahead(tmp_path)
    wait_for_thread()

    assert list(sent.items()) == [(str(tmp_path / name), (tmp_path / name).stat().st_size) for name in names]


@pytest.mark.parametrize(("max_bytes", "available", "expected"), [(5000, 10**6, 5000), (10**9, 10**4, 5000)])
def test_no_more_is_read_than_the_limit_and_half_of_the_free_memory(
    max_bytes: int, available: int, expected: int, sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", max_bytes)
    monkeypatch.setattr(reading, "available_memory_bytes", lambda: available)
    read_ahead(FOLDER)
    wait_for_thread()

    assert list(sent.values()) == [expected]


def test_a_load_begins_it(sent: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "without_collections", nullcontext)  # which is for good, and for other processes
    config = EngineConfig(FOLDER, device="cpu", max_model_len=10**6)
    with pytest.raises(InvalidConfigurationError):
        factory.load_engine_first(config, report=lambda *_: None)
    wait_for_thread()
    take_populated()

    assert list(sent) == [str(WEIGHTS.resolve())]


def test_what_cannot_be_read_is_left_to_loading(sent: Counter[str], tmp_path: Path) -> None:
    read_ahead(tmp_path / "nowhere")
    read_ahead(tmp_path)
    wait_for_thread()
    assert sent == {}


def test_without_a_thread_or_a_system_that_sends_files_nothing_is_read(
    sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("not a socket")

    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "sendfile", fail)
    read_ahead(FOLDER)
    wait_for_thread()
    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    read_ahead(FOLDER)

    assert sent == {}
