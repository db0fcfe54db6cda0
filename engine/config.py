"""The configuration of an engine: frozen, torch-free, checked when it is made.

`None` means that the engine chooses: ModelRunner picks a value for the device and reports it in EngineInfo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.scheduling.drafter import MAX_NGRAM, MIN_NGRAM

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendName = Literal["auto", "reference", "cpu"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an Engine. num_blocks takes precedence over kv_cache_bytes.

    speculative_ngram is the maximum number of last tokens to look up for a draft; 0 turns drafts off.
    """

    model_dir: Path
    device: Device = "auto"
    dtype: DType = "auto"
    attention_backend: AttentionBackendName = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_queued_reqs: int = 256
    max_queue_time_s: float | None = None
    enable_prefix_caching: bool = True
    speculative_ngram: int = 0
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("device", Device), ("dtype", DType), ("attention_backend", AttentionBackendName)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise InvalidConfigurationError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _check_at_least(name, getattr(self, name), 1)
        for name, low in (("num_blocks", 1), ("kv_cache_bytes", 1), ("max_model_len", 2), ("num_threads", 1)):
            value = getattr(self, name)
            if value is not None:
                _check_at_least(name, value, low)
        _check_at_least("max_num_queued_reqs", self.max_num_queued_reqs, 0)
        if self.max_queue_time_s is not None and not 0.0 < self.max_queue_time_s < math.inf:
            raise InvalidConfigurationError(
                f"max_queue_time_s must be a number of seconds over 0, got {self.max_queue_time_s}"
            )
        lengths = (0, *range(MIN_NGRAM, MAX_NGRAM + 1))
        if not isinstance(self.speculative_ngram, int) or self.speculative_ngram not in lengths:
            raise InvalidConfigurationError(
                f"speculative_ngram must be 0 or in [{MIN_NGRAM}, {MAX_NGRAM}], got {self.speculative_ngram!r}"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidConfigurationError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfigurationError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )


def _check_at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or value < low:
        raise InvalidConfigurationError(f"{name} must be an integer of at least {low}, got {value!r}")
