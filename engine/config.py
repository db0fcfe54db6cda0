"""The configuration of an engine: frozen, torch-free, checked when it is made.

`None` means that the engine chooses: ModelRunner picks a value for the device and reports it in EngineInfo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.scheduling.ngram import MAX_NGRAM, MIN_NGRAM
from gptserve.weights.pooling import Task

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4"]
QuantizationOption = Literal["none", "int8", "int4"]
"""Without any, weights that are stored as codes stay so where that is possible; with "none" they are unpacked."""
WeightType = Literal["int8", "int4", "int5", "int6"]
"""What becomes of a weight that is quantized: in int4, some have 5, 6 or 8 bits."""
KVCacheDType = Literal["auto", "int8"]
"""The type of stored keys and values: that of the model, or codes of int8 with a scale for each row of a head."""
AttentionBackendName = Literal["auto", "reference", "cpu", "triton"]

_MASTER_PORT = 29501  # vLLM's


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an Engine. num_blocks takes precedence over kv_cache_bytes.

    kv_cache_bytes are those of each of tensor_parallel_size processes; those of a node share num_threads.
    These processes are spread evenly over nnodes machines. The first one, node_rank 0, has the engine, and listens at
    master_addr and master_port for the others (engine/parallel/links.py).
    speculative_ngram is the maximum number of last tokens to look up for a draft; 0 turns drafts off. enforce_eager
    turns off the CUDA graphs of decoding steps. Without overlap the host plans no step while a GPU computes another.
    batch_invariant asks for answers that do not depend on the batch; a CPU gives such answers without it. An engine
    that cannot does not start. strict_config refuses a config.json with any key that is not known. task says
    which requests the engine takes: completions, or those for vectors, which need no head.
    """

    model_dir: Path
    device: Device = "auto"
    dtype: DType = "auto"
    quantization: QuantizationOption | None = None
    attention_backend: AttentionBackendName = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = _MASTER_PORT
    enforce_eager: bool = False
    overlap: bool = True
    batch_invariant: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_queued_reqs: int = 256
    max_queue_time_s: float | None = None
    enable_prefix_caching: bool = True
    speculative_ngram: int = 0
    strict_config: bool = False
    task: Task = "generate"

    def __post_init__(self) -> None:
        kinds = {"device": Device, "dtype": DType, "attention_backend": AttentionBackendName, "task": Task}
        for name, kind in {**kinds, "kv_cache_dtype": KVCacheDType}.items():
            choices = get_args(kind)
            self._check(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        quantizations = get_args(QuantizationOption)
        self._check("quantization", self.quantization in (None, *quantizations), f"None or {', '.join(quantizations)}")
        for name in ("tensor_parallel_size", "nnodes", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._check_at_least(name, 1)
        self._check_at_least("max_num_queued_reqs", 0)
        for name, low in (("num_blocks", 1), ("kv_cache_bytes", 1), ("max_model_len", 2), ("num_threads", 1)):
            if getattr(self, name) is not None:
                self._check_at_least(name, low)
        self._check_nodes()
        limit_s, ngram = self.max_queue_time_s, self.speculative_ngram
        self._check("max_queue_time_s", limit_s is None or 0.0 < limit_s < math.inf, "a number of seconds over 0")
        is_length = isinstance(ngram, int) and ngram in (0, *range(MIN_NGRAM, MAX_NGRAM + 1))
        self._check("speculative_ngram", is_length, f"0 or in [{MIN_NGRAM}, {MAX_NGRAM}]")
        self._check("gpu_memory_utilization", 0.0 < self.gpu_memory_utilization <= 1.0, "in (0, 1]")
        is_enough = self.max_num_batched_tokens >= self.max_num_seqs
        self._check("max_num_batched_tokens", is_enough, f"at least max_num_seqs ({self.max_num_seqs})")

    @property
    def requantization(self) -> Quantization | None:
        """What weights become while they load, whatever they are stored as; None: nothing."""
        return None if self.quantization == "none" else self.quantization

    @property
    def num_local_ranks(self) -> int:
        """How many of the tensor_parallel_size processes run on each node."""
        return self.tensor_parallel_size // self.nnodes

    def _check_nodes(self) -> None:
        is_multiple = self.tensor_parallel_size % self.nnodes == 0
        self._check("tensor_parallel_size", is_multiple, f"a multiple of nnodes ({self.nnodes})")
        is_rank = isinstance(self.node_rank, int) and 0 <= self.node_rank < self.nnodes
        self._check("node_rank", is_rank, f"in [0, nnodes), where nnodes is {self.nnodes}")
        is_port = isinstance(self.master_port, int) and 0 < self.master_port < 2**16
        self._check("master_port", is_port, "in [1, 65535]")
        if self.nnodes == 1:
            self._check("master_addr", self.master_addr is None, "None where nnodes is 1")
            self._check("master_port", self.master_port == _MASTER_PORT, "left alone where nnodes is 1")
        else:
            is_one = self.master_addr not in (None, "", "*", "0.0.0.0", "::", "[::]")
            self._check("master_addr", is_one, "the one address of the first node that the others reach")

    def _check_at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        self._check(name, isinstance(value, int) and value >= low, f"an integer of at least {low}")

    def _check(self, name: str, is_valid: bool, rule: str) -> None:
        if not is_valid:
            raise InvalidConfigurationError(f"{name} must be {rule}, got {getattr(self, name)!r}")
