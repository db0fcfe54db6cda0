"""The memory of the largest step: no other takes more, and the cache gets what it leaves.

`LiveMemory` stands in for a GPU's allocator: it counts the bytes of all tensors that operations made and that live.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptserve.engine.backends.cpu import native
from gptserve.engine.engine import Engine
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.runner import kv_cache, step_memory
from gptserve.engine.runner.memory import kv_bytes_per_token
from gptserve.engine.runner.step_memory import StepMemory, compute_largest_steps, measure
from gptserve.weights import huge_pages
from gptserve.weights.families import load_config
from tests.engine.runs import make_config, make_engine, make_request

CPU = torch.device("cpu")
CONTEXT = 128
SIZE = 2**30
"""Of the memory, in bytes."""
OPTIONS: dict[str, Any] = {
    **{"attention_backend": "reference", "max_num_seqs": 5, "max_num_batched_tokens": 300},
    **{"enable_prefix_caching": False},
}
ALL_PARAMETERS: dict[str, Any] = {
    **{"temperature": 0.8, "top_p": 0.5, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2},
    **{"frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "allowed_token_ids": tuple(range(90))},
    **{"logprobs": 20, "prompt_logprobs": 20},
}


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The DeviceMemory of what is computed in this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[StorageWeakRef, int] = {}
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
        self._peak = max(self._peak, self._live())
        return result

    def _live(self) -> int:
        self._sizes = {ref: n for ref, n in self._sizes.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(self._sizes.values())

    def reset(self) -> int:
        self._peak = self._live()
        return self._peak

    def peak(self) -> int:
        return self._peak

    def free(self) -> int:
        return SIZE - self._live()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveMemory]:
    """Watch, draw tokens in torch and let it allocate the cache, as on a GPU."""
    monkeypatch.setattr(native, "is_available", lambda: False)
    monkeypatch.setattr(huge_pages, "MAPPING", 0)
    monkeypatch.setattr(huge_pages, "mapped", partial(torch.zeros, dtype=torch.uint8))
    with LiveMemory() as watched:
        yield watched


def measured(memory: LiveMemory, engine: Engine, folder: Path, **options: Any) -> StepMemory:
    runner = engine._runner
    config, context = make_config(folder, **{**OPTIONS, **options}), runner.info.max_model_len
    with torch.inference_mode():
        return measure(
            memory,
            lambda: compute_largest_steps(config, runner._model, runner._decoder, runner._cache, CPU, context),
            lambda: None,
        )


@pytest.mark.slow
def test_no_step_takes_more_memory_than_the_largest(tiny_gpt2: Path, memory: LiveMemory) -> None:
    """Prompts as long as the context allows in a full batch, with every parameter, and then their tokens."""
    engine = make_engine(tiny_gpt2, **OPTIONS)
    largest = measured(memory, engine, tiny_gpt2).activations
    for i in range(OPTIONS["max_num_seqs"]):
        engine.add(make_request(str(i), [i] * (CONTEXT - 3), max_tokens=3, seed=i, **ALL_PARAMETERS))
    taken = []
    while engine.has_work:
        before = memory.reset()
        engine.step()
        taken.append(memory.peak() - before)
    assert 0.3 * largest < max(taken) <= largest


@pytest.mark.some(1)
@pytest.mark.parametrize("change", [{}, {"max_num_seqs": 300}])
def test_a_larger_step_takes_more(change: dict[str, Any], tiny_gpt2: Path, memory: LiveMemory) -> None:
    engine = make_engine(tiny_gpt2, **OPTIONS)
    smaller, larger = (
        measured(memory, engine, tiny_gpt2, **options) for options in ({}, {"max_num_batched_tokens": 600, **change})
    )
    assert larger.activations > 1.1 * smaller.activations


def test_the_cache_gets_what_the_largest_step_leaves(
    tiny_gpt2: Path, memory: LiveMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, share = 3_500_000, 0.4
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: free)
    monkeypatch.setattr(step_memory, "memory_of", lambda device: memory)
    with caplog.at_level(logging.INFO):
        engine = make_engine(tiny_gpt2, **OPTIONS, kv_cache_bytes=None)
    activations = measured(memory, engine, tiny_gpt2).activations
    block_bytes = 16 * kv_bytes_per_token(load_config(tiny_gpt2), element_bytes=4)
    assert engine.info.num_blocks == int((free - activations) * share) // block_bytes
    (line,) = [record.getMessage() for record in caplog.records if "GPU memory" in record.getMessage()]
    assert line.startswith("GPU memory: 0.00 GiB of weights, 0.00 GiB for activations, ")


def test_a_step_that_does_not_fit_is_one_sentence(memory: LiveMemory) -> None:
    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InvalidConfigurationError) as caught:
        measure(memory, step, lambda: None)
    assert str(caught.value) == (
        "the largest step does not fit into the GPU's memory beside the weights: lower max_num_batched_tokens, "
        "max_num_seqs or max_model_len"
    )


def test_weights_steps_and_graphs_count_apart_and_only_weights_stay(memory: LiveMemory) -> None:
    before = memory.reset()
    weights = torch.zeros(3000)
    sizes = measure(memory, lambda: torch.zeros(500) + torch.zeros(500), lambda: torch.zeros(200))
    assert sizes == StepMemory(weights=before + 12_000, activations=6000, graphs=800)
    assert memory.reset() == before + weights.nbytes
    assert measure(memory, lambda: None, lambda: None)[1:] == (0, None)
