"""Memory that is populated ahead: for which engines, how much, and that the packed weights lie in it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine import native
from gptserve.engine.config import EngineConfig
from gptserve.engine.engine import Engine
from gptserve.engine.model import memory_ahead
from gptserve.engine.model.linear import NativeLinear
from gptserve.engine.model.memory import linear_bytes
from gptserve.engine.model.memory_ahead import populate_ahead, take_populated
from gptserve.weights.families import load_config
from gptserve.weights.mappings import HUGE_PAGE, address_of, map_memory
from gptserve.weights.source import EMBEDDED_MODEL, resolve_model

FOLDER = resolve_model(EMBEDDED_MODEL)
CONFIG = EngineConfig(FOLDER, device="cpu", dtype="bfloat16", num_blocks=64)

PAGE = 4096

needs_library = pytest.mark.skipif(not native.supported_variants(), reason="this CPU or installation has no products")


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


def resident_bytes(memory: memoryview) -> int:
    """Return how many bytes of the mapping are populated, in whole pages."""
    num_pages = -(-len(memory) // PAGE)
    found = (ctypes.c_ubyte * num_pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory)), found) == 0
    return PAGE * sum(flags & 1 for flags in found)


@needs_library
def test_populated_memory_is_given_once() -> None:
    num_bytes = linear_bytes(load_config(FOLDER), None)
    populate_ahead(CONFIG)
    wait_for_thread()
    memory = take_populated()

    assert memory is not None
    assert resident_bytes(memory) >= num_bytes
    assert resident_bytes(memory) < num_bytes + 2 * HUGE_PAGE, "what packing may add is only addresses"
    assert not any(memory)
    assert take_populated() is None


@needs_library
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_all_packed_weights_lie_in_it(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack_rows = NativeLinear._pack_rows

    def noted(self: NativeLinear, *args: Any) -> int:
        packed.append(pack_rows(self, *args))
        return packed[-1]

    config = replace(CONFIG, quantization=quantization)
    populate_ahead(config)
    (memory,) = memory_ahead._populated
    start = address_of(memory)
    monkeypatch.setattr(NativeLinear, "_pack_rows", noted)
    engine = Engine(config)

    assert not memory_ahead._populated
    in_it = [address for address in packed if start <= address < start + len(memory)]
    assert len(in_it) >= 4 * load_config(FOLDER).num_layers + 1
    assert engine.info.kv_cache_bytes


@needs_library
@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float32"}, {"device": "cuda"}, {"tensor_parallel_size": 2}, {"model_dir": Path("/nowhere")}],
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
    memory = map_memory(64 * PAGE)  # fills no huge page
    native.library().native_populate_first(address_of(memory), 8, 8 * PAGE)

    assert resident_bytes(memory) == 8 * PAGE
    native.library().native_populate(address_of(memory), len(memory))
    assert resident_bytes(memory) == 64 * PAGE
