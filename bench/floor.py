"""The floor of decoding: a step reads the weights and the keys and values of its sequences once.

`bench/decode.py` measures the time to read so many bytes in the same run, with the same threads.
"""

from __future__ import annotations

import time

import torch

from gptserve.engine.model.memory import kv_bytes_per_token, parameter_counts
from gptserve.weights.config import ModelConfig
from gptserve.weights.huge_pages import mapped

_PASSES = 5


def step_bytes(
    model: ModelConfig, dtype: torch.dtype, batch: int, context: int, weight_bytes: int | None = None
) -> int:
    """Return the bytes that a step of so many sequences reads at this context. None: weights are in dtype, too."""
    counts = parameter_counts(model)
    unread = counts["position"] + (counts["embedding"] if counts["head"] else 0)  # but some rows
    weights = (sum(counts.values()) - unread) * (weight_bytes or dtype.itemsize)
    return weights + batch * context * kv_bytes_per_token(model, dtype.itemsize)


class Reader:
    """Reads the device's memory, as much as a model's weights: what a cache holds of these, it holds here.

    On a CPU it takes torch's threads, and huge pages as the weights do.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        size = num_bytes // torch.float32.itemsize * torch.float32.itemsize
        whole = mapped(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
        self._buffer = whole.view(torch.float32).fill_(1)

    def bytes_per_second(self) -> float:
        """Return the bandwidth of the fastest of some passes."""
        times = []
        for _ in range(_PASSES):
            start = time.perf_counter()
            self._buffer.sum().item()
            times.append(time.perf_counter() - start)
        return self._buffer.nbytes / min(times)
