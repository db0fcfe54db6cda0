"""The memory that steps take on a GPU beside weights and cache, measured before the cache is sized.

The largest steps that the configuration allows are computed once, with a cache of one block in which all positions
lie: their numbers mean nothing, but their tensors have the sizes of real ones. CUDA graphs are recorded with that cache
and dropped, because those that are used need the addresses of the real one. `make_cache` gives the cache what is left.
On a CPU nothing is measured. ModelRunner calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gptserve.engine.backends.gpu.graphs import DecodeGraphs, capture_decoding
from gptserve.engine.backends.gpu.sampler import TritonSampler
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.grammar.matcher import Mask
from gptserve.engine.model.attention import AttentionBackend
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.group import OtherRanks
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.request import MAX_LOGPROBS, SamplingParams
from gptserve.engine.runner.kv_cache import KVCache, cache_dtype, cache_memory_bytes
from gptserve.engine.runner.logprobs import top_logprobs
from gptserve.engine.runner.memory import plan_cache
from gptserve.engine.runner.sampler import sample
from gptserve.engine.runner.state_memory import plan_states, state_bytes
from gptserve.engine.sampling.choice import SamplingPosition, SamplingState
from gptserve.engine.scheduling.drafter import MAX_DRAFTING_STEP_TOKENS
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

    def free(self) -> int:
        """Give back what no tensor holds, and return what is left."""


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

    def free(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class StepMemory(NamedTuple):
    """In bytes: all tensors before a step, which are the weights; what a step takes in addition; the CUDA graphs."""

    weights: int
    activations: int
    graphs: int | None
    """None if there are none."""


class Made(NamedTuple):
    """What `make_cache` made. There are no graphs where steps are computed without."""

    cache: KVCache
    graphs: DecodeGraphs | None
    num_blocks: int
    max_model_len: int


def make_cache(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    ranks: OtherRanks | None = None,
    sampler: TritonSampler | None = None,
) -> Made:
    """Return the cache and the graphs of decoding steps with it. The decoder and all ranks then have max_model_len.

    Raises InvalidConfigurationError if there is too little memory.
    """
    longest = config.max_model_len or model.max_position
    reserved = max(backend.scratch_bytes(longest, layer.head_size, num_threads) for layer in model.distinct_layers)
    memory, measured, rows = memory_of(device), None, cache_dtype(config, dtype)

    def capture(cache: KVCache, max_model_len: int, ranks: OtherRanks | None = None) -> DecodeGraphs | None:
        sizes = max_model_len, device
        return capture_decoding(config, model, decoder, backend, cache, *sizes, sampler=sampler, ranks=ranks)

    if memory is not None:
        decoder.set_max_model_len(longest)
        one_block = KVCache(model, 1, config.block_size, rows, device)
        measured = measure(
            memory,
            lambda: compute_largest_steps(config, model, decoder, one_block, device, longest, sampler),
            lambda: capture(one_block, longest),
        )
        reserved += measured.activations + (measured.graphs or 0)
        del one_block
        memory.reset()
    budget = cache_memory_bytes(config, device, reserved) if ranks is None else ranks.least_memory(reserved)
    num_states = plan_states(config, model, budget[1])
    budget = budget[0] - num_states * state_bytes(model), budget[1] - num_states * state_bytes(model)
    num_blocks, max_model_len = plan_cache(config, model, rows.itemsize, *budget)
    cache = KVCache(model, num_blocks, config.block_size, rows, device, num_states)
    decoder.set_max_model_len(max_model_len)
    has_graphs = measured is not None and measured.graphs is not None
    if ranks is not None:
        ranks.begin(num_blocks, max_model_len, has_graphs=has_graphs)
    if measured is not None:
        sizes = (measured.weights, measured.activations, measured.graphs or 0, cache.num_bytes)
        logger.info(
            "GPU memory: %.2f GiB of weights, %.2f GiB for activations, %.2f GiB of CUDA graphs, %.2f GiB of KV cache",
            *(size / 2**30 for size in sizes),
        )
    return Made(cache, capture(cache, max_model_len, ranks) if has_graphs else None, num_blocks, max_model_len)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU, whose steps take what the operating system has left."""
    return CudaMemory(device) if device.type == "cuda" else None


def measure(memory: DeviceMemory, compute_steps: Callable[[], object], capture: Callable[[], object]) -> StepMemory:
    """Return what the steps and the graphs take. Raises InvalidConfigurationError if the steps take too much."""
    weights = memory.reset()
    try:
        compute_steps()
    except torch.OutOfMemoryError as error:
        raise InvalidConfigurationError(
            "the largest step does not fit into the GPU's memory beside the weights: lower max_num_batched_tokens, "
            "max_num_seqs or max_model_len"
        ) from error
    activations = memory.peak() - weights
    # Graphs take memory that torch does not count. The steps have loaded what is loaded once.
    free = memory.free()
    graphs = capture()
    return StepMemory(weights, activations, None if graphs is None else max(0, free - memory.free()))


def compute_largest_steps(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    cache: KVCache,
    device: torch.device,
    max_model_len: int,
    sampler: TritonSampler | None = None,
) -> None:
    """Compute as many tokens as a step may have, of few and of many sequences; sample with every parameter there is."""
    if sampler is not None:
        sampler.counts.reserve()  # they stay from one step to the next
    for num_seqs in (-(-config.max_num_batched_tokens // max_model_len), config.max_num_seqs):
        spans = _largest_step(min(num_seqs, config.max_num_seqs), config, max_model_len)
        inputs = model_input(lay_out(spans, config.block_size).as_numpy(), device)
        hidden = decoder.hidden_states(inputs.token_ids_T, inputs.positions_T, cache, inputs.metadata)
    # Steps with drafts have more rows than sequences, and prompts have their logprobs in pieces.
    num_sampled, num_top = max_sampled_rows(config), min(MAX_LOGPROBS, model.vocab_size)
    (rows_R,) = to_device(device, np.zeros(max(num_sampled, LOGIT_ROWS), np.int64))
    params = SamplingParams(
        top_p=0.9,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        allowed_token_ids=(0,),
        logprobs=num_top,
    )
    everything: Mask = np.full(-(-model.vocab_size // 32), 2**32 - 1, np.uint32)
    position = SamplingPosition(SamplingState(params, seed=0, num_prompt_tokens=1), [0], allowed=everything)
    logits = decoder.logits(hidden[rows_R])
    choose = None if sampler is None else sampler.choose
    sample(logits, [position] * num_sampled, choose=choose)
    top_logprobs(logits[:LOGIT_ROWS], rows_R[:LOGIT_ROWS], [num_top] * LOGIT_ROWS)
    if sampler is not None:
        sampler.counts.release()


def max_sampled_rows(config: EngineConfig) -> int:
    """Return how many tokens a step may sample; one with drafts has more than sequences."""
    return max(config.max_num_seqs, MAX_DRAFTING_STEP_TOKENS)


def _largest_step(num_seqs: int, config: EngineConfig, max_model_len: int) -> list[Span]:
    """Return sequences that end at the longest context; the first ones read as much of their prompt as they can."""
    spans, num_left, block_ids = (
        list[Span](),
        config.max_num_batched_tokens,
        [0] * -(-max_model_len // config.block_size),
    )
    for num_others in reversed(range(num_seqs)):
        num_tokens = min(max_model_len, num_left - num_others)
        num_left -= num_tokens
        spans.append(Span([0] * num_tokens, max_model_len - num_tokens, block_ids, num_sampled=1))
    return spans
