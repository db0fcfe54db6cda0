"""Memory that is populated ahead: for which engines, how much, and that the packed weights lie in it."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeLinear
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.process import factory
from gptserve.engine.runner import memory_ahead
from gptserve.engine.runner.memory import linear_bytes
from gptserve.engine.runner.memory_ahead import populate_ahead, take_populated
from gptserve.weights.families import load_config
from gptserve.weights.mappings import HUGE_PAGE, address_of, map_memory
from gptserve.weights.source import EMBEDDED_MODEL, resolve_model
from tests.engine.client_harness import LIMIT_S

FOLDER = resolve_model(EMBEDDED_MODEL)
CONFIG = EngineConfig(FOLDER, device="cpu", dtype="bfloat16", num_blocks=64)

PAGE = 4096
MARGIN = 2**20  # what else this process may take meanwhile

needs_library = pytest.mark.skipif(not native.is_available(), reason="the library is not built")


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(memory_ahead, "usable_cpus", lambda: 2)
    monkeypatch.setattr(memory_ahead, "NVIDIA_DRIVER", tmp_path / "version")
    yield
    wait_for_thread()
    take_populated()


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "gptserve-memory":
            thread.join()


def anonymous_bytes() -> int:
    """Return how many bytes this process has written to and no file holds. Pages that were only read do not count."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"^Anonymous: +(\d+) kB$", rollup, re.M)[1])


@needs_library
def test_populated_memory_is_given_once() -> None:
    num_bytes, before = linear_bytes(load_config(FOLDER), None, 2), anonymous_bytes()
    populate_ahead(CONFIG)
    wait_for_thread()
    populated, memory = anonymous_bytes() - before, take_populated()

    assert memory is not None
    assert populated > num_bytes - MARGIN
    assert populated < num_bytes + 2 * HUGE_PAGE + MARGIN, "padding is only addresses"
    assert not any(memory)
    assert take_populated() is None


@needs_library
def test_it_begins_without_torch_which_is_imported_meanwhile() -> None:
    code = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None  # an import of it fails from here on
from gptserve.engine.config import EngineConfig
from gptserve.engine.runner import memory_ahead
memory_ahead.usable_cpus = lambda: 2
memory_ahead.populate_ahead(EngineConfig(Path({str(FOLDER)!r}), device="cpu"))
print(memory_ahead.take_populated() is not None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.some(2)
@needs_library
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_is_populated_is_taken_and_holds_all_packed_weights(
    dtype: Any, quantization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, packed, decoders = list[int](), list[int](), list[Decoder]()
    monkeypatch.setattr(memory_ahead, "_populate", lambda _, num_bytes: sizes.append(num_bytes))
    keep, make_decoder = NativeLinear._keep, Decoder.__init__

    def noted(self: NativeLinear, memory: torch.Tensor) -> int:
        packed.append(keep(self, memory))
        return packed[-1]

    def making(self: Decoder, *args: Any, **options: Any) -> None:
        packed.clear()  # those of self-tests, which come before
        decoders.append(self)
        make_decoder(self, *args, **options)

    populate_ahead(replace(CONFIG, dtype=dtype, quantization=quantization))
    wait_for_thread()
    memory = memory_ahead._populated[0]
    monkeypatch.setattr(NativeLinear, "_keep", noted)
    monkeypatch.setattr(Decoder, "__init__", making)
    Engine(replace(CONFIG, dtype=dtype, quantization=quantization))

    assert not memory_ahead._populated
    start, rest = address_of(memory), decoders[-1]._source.maker._memory._rest
    assert len(packed) > load_config(FOLDER).num_layers
    assert all(start <= address < start + len(memory) for address in packed)
    assert sizes[0] <= rest.data_ptr() - start <= len(memory)


@needs_library
def test_a_load_that_fails_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "without_collections", nullcontext)  # which is for good, and for other processes
    with pytest.raises(InvalidConfigurationError):
        factory.load_engine_first(replace(CONFIG, max_model_len=10**6), report=lambda *_: None)

    assert take_populated() is None


@needs_library
def test_without_a_thread_the_engine_loads_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    populate_ahead(CONFIG)

    assert take_populated() is None


@needs_library
@pytest.mark.parametrize(
    "changes",
    [{"device": "cuda"}, {"tensor_parallel_size": 2}, {"model_dir": Path("/nowhere")}],
    ids=str,
)
def test_engines_that_pack_nothing_of_ours_get_none(changes: dict[str, Any]) -> None:
    populate_ahead(replace(CONFIG, **changes))

    assert take_populated() is None


@needs_library
@pytest.mark.parametrize("has_driver", [True, False])
def test_a_machine_that_may_have_a_gpu_gets_none_unless_the_cpu_is_asked_for(has_driver: bool) -> None:
    if has_driver:
        memory_ahead.NVIDIA_DRIVER.touch()
    populate_ahead(replace(CONFIG, device="auto"))
    assert (take_populated() is None) is has_driver
    wait_for_thread()

    populate_ahead(CONFIG)
    assert take_populated() is not None


@needs_library
@pytest.mark.parametrize(("name", "value"), [("usable_cpus", 1), ("available_memory_bytes", 100_000)])
def test_without_a_second_cpu_or_enough_memory_there_is_none(
    name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_ahead, name, lambda: value)
    populate_ahead(CONFIG)

    assert take_populated() is None


@needs_library
def test_a_large_model_gets_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ahead, "MAX_BYTES", 2 * HUGE_PAGE)
    monkeypatch.setattr(memory_ahead, "linear_bytes", lambda *_: 2**50)
    populate_ahead(CONFIG)
    memory = take_populated()

    assert memory is not None
    assert 2 * HUGE_PAGE <= len(memory) <= 4 * HUGE_PAGE


@needs_library
def test_populating_changes_no_byte() -> None:
    memory = map_memory(5 * PAGE)
    memory[0], memory[PAGE], memory[-1] = 1, 255, 7
    before = bytes(memory)
    native.library().native_populate(address_of(memory), len(memory))

    assert bytes(memory) == before


@needs_library
def test_the_first_page_of_each_array_is_populated() -> None:
    num_pages = 4096
    mapping = mmap.mmap(-1, num_pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    address, before = address_of(memoryview(mapping)), anonymous_bytes()
    native.library().native_populate_first(address, num_pages // 8, 8 * PAGE)
    first = anonymous_bytes() - before
    native.library().native_populate(address, len(mapping))
    whole = anonymous_bytes() - before

    assert abs(first - num_pages // 8 * PAGE) < MARGIN
    assert abs(whole - num_pages * PAGE) < MARGIN
