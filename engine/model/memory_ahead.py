"""Memory for packed weights on a CPU, which a thread populates while torch is imported. Torch-free.

The system clears a page when it is first written: 0.3 ms for a huge one, and 7 to 9 ms where a virtual machine gets the
memory from its host only then. Packing would wait for that, and importing torch leaves a CPU idle. factory.py begins
it, and streamed_tensors.py takes it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from gptserve.engine import native
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.host_cpus import usable_cpus
from gptserve.engine.model.memory import available_memory_bytes, linear_bytes
from gptserve.weights.errors import WeightsError
from gptserve.weights.families import load_config
from gptserve.weights.mappings import HUGE_PAGE, address_of, map_memory

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Linux has it while the driver is loaded; in containers, too, whether or not they were given a GPU."""

MAX_BYTES = 2**30
"""More than the import hides; and the pages of the files, which are yet to be read, should not have to go."""

_ADDED_SHARE = 8
"""One byte more in so many is mapped, for what packing adds: padding, and what is not quantized."""

_populated: list[memoryview] = []


def populate_ahead(config: EngineConfig) -> None:
    """Begin to populate what `take_populated` is to return, unless this engine will pack no weights."""
    num_bytes = min(MAX_BYTES, _packed_bytes(config))
    if 0 < num_bytes < available_memory_bytes():
        with suppress(MemoryError):
            memory = map_memory(num_bytes + num_bytes // _ADDED_SHARE + HUGE_PAGE)
            threading.Thread(target=_populate, args=(memory, num_bytes), name="gptserve-memory", daemon=True).start()
            _populated.append(memory)


def take_populated() -> memoryview | None:
    """Return zeros, once: the thread may yet be at work on them, and leaves the last ones to who writes there."""
    return _populated.pop() if _populated else None


def _populate(memory: memoryview, num_bytes: int) -> None:
    native.library().native_populate(address_of(memory), num_bytes)


def _packed_bytes(config: EngineConfig) -> int:
    """Return how many bytes of weights the engine will pack for our own products at least."""
    packs = native.supported_int8_variants() if config.quantization else native.supported_variants()
    if not packs or config.device == "cuda" or (config.device == "auto" and NVIDIA_DRIVER.exists()):
        return 0
    if usable_cpus() == 1 or config.tensor_parallel_size > 1 or (config.dtype == "float32" and not config.quantization):
        return 0
    try:
        return linear_bytes(load_config(config.model_dir), config.quantization)
    except WeightsError:
        return 0  # the engine says what is wrong
