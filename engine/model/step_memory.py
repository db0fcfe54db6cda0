"""The memory that steps take on a GPU beside weights and cache, measured before the cache is sized.

The largest steps that the configuration allows are computed once, with a cache of one block in which all positions
lie: their numbers mean nothing, but their tensors have the sizes of real ones. `make_cache` gives the cache what is
left. On a CPU nothing is measured. ModelRunner calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gptserve.engine.attention import AttentionBackend
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.model.batch import build_model_input
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.kv_cache import KVCache, cache_memory_bytes
from gptserve.engine.model.memory import plan_cache
from gptserve.engine.parallel.ranks import Ranks
from gptserve.engine.request import MAX_LOGPROBS, Request, SamplingParams
from gptserve.engine.sampling.sampler import SamplingPosition, sample
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.staging import to_device
from gptserve.weights.config import ModelConfig

logger = logging.getLogger(__name__)

LOGIT_ROWS = 64
"""Rows of prompt logits computed at once: 64 fp32 rows of a 50,000-token vocabulary take 13 MB."""


class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    def reset(self) -> int:
        """Give back what no tensor holds, forget the peak, and return the bytes of all tensors."""

    def peak(self) -> int:
        """Return the most that all tensors took since `reset`."""


class CudaMemory:
    """The DeviceMemory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The bytes of all tensors before a step, which are the weights, and those that it takes in addition."""

    weight_bytes: int
    activation_bytes: int


def make_cache(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    ranks: Ranks | None = None,
) -> tuple[KVCache, int, int]:
    """Return the cache, its number of blocks and max_model_len, which the decoder and all ranks then have.

    Raises InvalidConfigurationError if there is too little memory.
    """
    longest = config.max_model_len or model.max_position
    reserved = backend.scratch_bytes(longest, model.head_size, num_threads)
    device_memory, measured = memory_of(device), None
    if device_memory is not None:
        decoder.set_max_model_len(longest)
        measured = measure(device_memory, lambda: largest_step(config, model, decoder, dtype, device, longest))
        reserved += measured.activation_bytes
    budget = cache_memory_bytes(config, device, reserved) if ranks is None else ranks.least_memory(reserved)
    num_blocks, max_model_len = plan_cache(config, model, dtype.itemsize, *budget)
    cache = KVCache(model, num_blocks, config.block_size, dtype, device)
    decoder.set_max_model_len(max_model_len)
    if ranks is not None:
        ranks.begin(num_blocks, max_model_len)
    if measured is not None:
        sizes = (measured.weight_bytes, reserved, sum(layer.nbytes for layer in cache.layers))
        logger.info(
            "GPU memory: %.2f GiB of weights, %.2f GiB for activations, %.2f GiB of KV cache",
            *(size / 2**30 for size in sizes),
        )
    return cache, num_blocks, max_model_len


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU, whose steps take what the operating system has left."""
    return CudaMemory(device) if device.type == "cuda" else None


def measure(memory: DeviceMemory, step: Callable[[], None]) -> StepMemory:
    """Compute the step and return what it took. Raises InvalidConfigurationError if that is too much."""
    before = memory.reset()
    try:
        step()
    except torch.OutOfMemoryError as error:
        raise InvalidConfigurationError(
            "the largest step does not fit into the GPU's memory beside the weights: lower max_num_batched_tokens, "
            "max_num_seqs or max_model_len"
        ) from error
    measured = StepMemory(before, memory.peak() - before)
    memory.reset()
    return measured


def largest_step(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> None:
    """Compute as many tokens as a step may have, of few and of many sequences; sample with every parameter there is."""
    cache = KVCache(model, 1, config.block_size, dtype, device)
    for num_seqs in (-(-config.max_num_batched_tokens // max_model_len), config.max_num_seqs):
        batch = _largest_batch(min(num_seqs, config.max_num_seqs), config, max_model_len)
        inputs = build_model_input(batch, config.block_size, device)
        hidden = decoder.hidden_states(inputs.token_ids_T, inputs.positions_T, cache, inputs.metadata)
    # Steps with drafts have more rows than sequences, and prompts have their logprobs in pieces.
    num_rows = max(config.max_num_seqs, MAX_DRAFTING_STEP_TOKENS, LOGIT_ROWS)
    (rows_R,) = to_device(device, np.zeros(num_rows, np.int64))
    params = SamplingParams(
        top_p=0.9,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        allowed_token_ids=(0,),
        logprobs=min(MAX_LOGPROBS, model.vocab_size),
    )
    sequence = SequenceState(Request("largest", (0,), params, seed=0), arrival=0, token_ids=[0])
    everything: Mask = np.full(-(-model.vocab_size // 32), 2**32 - 1, np.uint32)
    sample(decoder.logits(hidden[rows_R]), [SamplingPosition(sequence, allowed=everything)] * num_rows)


def _largest_batch(num_seqs: int, config: EngineConfig, max_model_len: int) -> ScheduledBatch:
    """Return sequences that end at the longest context; the first ones read as much of their prompt as they can."""
    request = Request("largest", (0,), SamplingParams(), seed=0)
    token_ids, block_ids = [0] * max_model_len, [0] * -(-max_model_len // config.block_size)
    items, num_left = [], config.max_num_batched_tokens
    for num_others in reversed(range(num_seqs)):
        num_tokens = min(max_model_len, num_left - num_others)
        num_left -= num_tokens
        sequence = SequenceState(request, 0, token_ids, num_computed=max_model_len - num_tokens, block_ids=block_ids)
        items.append(ScheduledSequence(sequence, num_tokens))
    return ScheduledBatch(tuple(items))
