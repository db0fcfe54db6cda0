"""The floor of decoding: a step reads the weights and the keys and values of its sequences once.

`bench/decode.py` and `bench/step_parts.py` measure the time to read so many bytes in the same run, with the same
threads.
"""

from __future__ import annotations

import statistics
import time

import torch

from gptserve.engine.config import Quantization
from gptserve.engine.runner.memory import kv_bytes_per_token, linear_bytes, parameter_counts
from gptserve.weights.config import ModelConfig
from gptserve.weights.huge_pages import mapped

_PASSES = 9
_CUDA_PASSES = 40


def step_bytes(
    model: ModelConfig, dtype: torch.dtype, batch: int, context: int, quantization: Quantization | None = None
) -> int:
    """Return the bytes that a step of so many sequences reads at this context.

    For int8 scales, biases, norms and what is not quantized are left out, which `bench/step_parts.py` counts.
    """
    if quantization is None:
        counts = parameter_counts(model)
        unread = counts["position"] + (counts["embedding"] if counts["head"] else 0)  # but some rows
        weights = (sum(counts.values()) - unread) * dtype.itemsize
    else:
        weights = linear_bytes(model, quantization, dtype.itemsize)
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
        """Return the bandwidth of the median of some passes; on a GPU of some rounds of passes.

        The time of a step is a mean, and other programs slow shared memory: the fastest pass would not be comparable.
        """
        seconds = self._cuda_pass_s if self._buffer.is_cuda else self._pass_s
        return self._buffer.nbytes / statistics.median(seconds() for _ in range(_PASSES))

    def _pass_s(self) -> float:
        start = time.perf_counter()
        self._buffer.amax().item()  # a sum takes longer than memory where that is fast
        return time.perf_counter() - start

    def _cuda_pass_s(self) -> float:
        """Return the time of a pass among many: by the host's clock the start and the end of one would count, too."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._buffer.sum()  # the host is ahead of the device from here on
        begin.record()
        for _ in range(_CUDA_PASSES):
            self._buffer.sum()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _CUDA_PASSES
