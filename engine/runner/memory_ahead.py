"""Memory for packed weights on a CPU, which a thread populates while torch is imported. Torch-free.

The system clears a page when it is first written: 0.3 ms for a huge one, and 7 to 9 ms where a virtual machine gets the
memory from its host only then. Packing would wait for that, and importing torch leaves a CPU idle.
engine/process/factory.py begins it, and input_squares.py takes the memory.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import EngineConfig
from gptserve.engine.runner.host_cpus import NVIDIA_DRIVER, usable_cpus
from gptserve.engine.runner.memory import available_memory_bytes, codes_kept, keeps_codes, linear_bytes
from gptserve.weights.errors import WeightsError
from gptserve.weights.families import load_config
from gptserve.weights.inventory import code_formats
from gptserve.weights.mappings import HUGE_PAGE, address_of, map_memory

MAX_BYTES = 2**30
"""More than the import hides; and the pages of the files, which are yet to be read, should not have to go."""

_ADDED_SHARE = 8
"""One byte more in so many is mapped, and not populated, for padding."""

_populated: list[memoryview] = []


def populate_ahead(config: EngineConfig) -> None:
    """Begin to populate what `take_populated` is to return, unless this engine will pack no weights."""
    num_bytes = min(MAX_BYTES, _packed_bytes(config))
    if 0 < num_bytes < available_memory_bytes():
        with suppress(MemoryError, RuntimeError):  # without memory, or a thread, packing waits
            memory = map_memory(num_bytes + num_bytes // _ADDED_SHARE + HUGE_PAGE)
            threading.Thread(target=_populate, args=(memory, num_bytes), name="gptserve-memory", daemon=True).start()
            _populated.append(memory)


def take_populated() -> memoryview | None:
    """Return zeros, once. The thread may still be populating them; the last bytes are never populated ahead."""
    return _populated.pop() if _populated else None


def _populate(memory: memoryview, num_bytes: int) -> None:
    native.library().native_populate(address_of(memory), num_bytes)


def _packed_bytes(config: EngineConfig) -> int:
    """Return how many bytes of weights the engine will pack for our own products at least."""
    if config.device == "cuda" or (config.device == "auto" and NVIDIA_DRIVER.exists()):
        return 0
    others_bytes = 4 if config.dtype == "float32" else 2  # of weights that are not quantized
    if not native.is_available() or usable_cpus() == 1 or config.tensor_parallel_size > 1:
        return 0
    try:
        model = load_config(config.model_dir)
        codes = codes_kept(model, code_formats(config.model_dir, model)) if keeps_codes(config) else {}
        return linear_bytes(model, config.requantization, others_bytes, codes)
    except WeightsError:
        return 0  # the engine says what is wrong
