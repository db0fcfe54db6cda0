"""The engine's configuration checks itself at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError

NODES: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "mps"}, "device must be one of auto, cpu, cuda, got 'mps'"),
        ({"quantization": "int3"}, "quantization must be None or none, int8, int4, got 'int3'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of auto, int8, got 'fp8'"),
        ({"dtype": "bf16"}, "dtype must be one of auto, float32, bfloat16, float16, got 'bf16'"),
        ({"attention_backend": "flash"}, "attention_backend must be one of auto, reference, cpu, triton, got 'flash'"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": 2.5}, "block_size must be an integer of at least 1, got 2.5"),
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2, got 1"),
        ({"num_blocks": -1}, "num_blocks must be an integer of at least 1, got -1"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs must be an integer of at least 0, got -1"),
        ({"speculative_ngram": 1}, "speculative_ngram must be 0 or in [2, 8], got 1"),
        ({"speculative_ngram": 3.0}, "speculative_ngram must be 0 or in [2, 8], got 3.0"),
        ({"speculative_ngram": 9}, "speculative_ngram must be 0 or in [2, 8], got 9"),
        ({"max_queue_time_s": 0.0}, "max_queue_time_s must be a number of seconds over 0, got 0.0"),
        ({"max_queue_time_s": math.inf}, "max_queue_time_s must be a number of seconds over 0, got inf"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be in (0, 1], got 1.1"),
        ({"nnodes": 0}, "nnodes must be an integer of at least 1, got 0"),
        ({"nnodes": 2}, "tensor_parallel_size must be a multiple of nnodes (2), got 1"),
        ({**NODES, "tensor_parallel_size": 3}, "tensor_parallel_size must be a multiple of nnodes (2), got 3"),
        ({**NODES, "node_rank": 2}, "node_rank must be in [0, nnodes), where nnodes is 2, got 2"),
        ({"node_rank": 1}, "node_rank must be in [0, nnodes), where nnodes is 1, got 1"),
        ({**NODES, "node_rank": -1}, "node_rank must be in [0, nnodes), where nnodes is 2, got -1"),
        ({**NODES, "master_port": 0}, "master_port must be in [1, 65535], got 0"),
        ({"master_port": 5}, "master_port must be left alone where nnodes is 1, got 5"),
        ({"master_addr": "::1"}, "master_addr must be None where nnodes is 1, got '::1'"),
        *(
            (
                {**NODES, "master_addr": address},
                f"master_addr must be the one address of the first node that the others reach, got {address!r}",
            )
            for address in (None, "", "0.0.0.0", "::")
        ),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "max_num_batched_tokens must be at least max_num_seqs (64), got 63",
        ),
    ],
)
def test_a_setting_that_breaks_a_rule_is_named_with_rule_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigurationError) as caught:
        EngineConfig(model_dir=Path(), **options)
    assert str(caught.value) == message


def test_the_defaults_keep_the_rules() -> None:
    assert EngineConfig(model_dir=Path()).block_size == 16


def test_nodes_share_the_ranks_evenly() -> None:
    assert EngineConfig(Path(), **NODES | {"tensor_parallel_size": 8}).num_local_ranks == 4
