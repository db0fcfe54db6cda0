"""Runs the model: a ScheduledBatch in, sampled tokens and prompt logprobs out.

It owns everything with tensors (weights, KV cache, attention backend). hardware.py and memory.py choose what
EngineConfig left open: device, dtype, threads, context and cache size. It does not know why a sequence was scheduled.
Engine calls it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gptserve.engine import native
from gptserve.engine.attention.choice import choose_backend
from gptserve.engine.config import EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.grammar.matcher import Mask, Masks, MaskThread
from gptserve.engine.model.batch import ModelInput, build_arrays, model_input
from gptserve.engine.model.batch_invariance import check_model, choose_products, set_up_device
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.fingerprint import digest_of, fingerprint, numeric_causes
from gptserve.engine.model.hardware import choose_device, choose_dtype, set_num_threads
from gptserve.engine.model.host_cpus import FreeCpus
from gptserve.engine.model.int8 import check_quantization
from gptserve.engine.model.layers import layer_specs
from gptserve.engine.model.linear import MIN_ROWS, product_of
from gptserve.engine.model.operations_choice import choose_operations
from gptserve.engine.model.step_memory import LOGIT_ROWS, make_cache
from gptserve.engine.model.step_threads import StepWork, num_step_threads
from gptserve.engine.parallel.ranks import Ranks
from gptserve.engine.request import EngineInfo, Request, SamplingParams, TokenLogprobs
from gptserve.engine.sampling.logprobs import top_logprobs
from gptserve.engine.sampling.sampler import Choose, SampledTokens, SamplingPosition, sample
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.staging import to_device
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.sharding import Share

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8
"""Tokens of the fingerprint's sample: enough for attention over several keys."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a forward pass.

    `sampled` has one entry for each item that needs sampling, in order: the token after the known ones, then the token
    after each draft token. prompt_logprobs maps the index of an item to (position, entry) of the prompt tokens that it
    predicted.
    """

    sampled: tuple[SampledTokens, ...]
    prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]]


class ModelRunner:
    """A loaded model on its device, with its KV cache.

    Raises WeightsError if the model is unusable, InvalidConfigurationError if a setting is.
    `progress(bytes_done, bytes_total)` is called while weights load.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        num_threads = set_num_threads(config)
        self.device = choose_device(config)
        set_up_device(config, self.device)
        dtype, quantization = choose_dtype(config, self.device), config.quantization
        whole = load_config(config.model_dir)
        _check_max_model_len(config, whole.max_position)
        check_quantization(config, whole, self.device)
        share = Share(0, config.tensor_parallel_size)
        self._model = share.of_config(whole)
        specs = layer_specs(self._model, self.device)
        backend = choose_backend(config.attention_backend, self.device, dtype, specs, config.block_size)
        checkpoint = Checkpoint(config.model_dir, whole, share)
        # After the checkpoint has shown the sizes to be true: these two multiply matrices of them.
        operations = choose_operations(self._model, self.device, dtype)
        products = choose_products(config, self._model, self.device, dtype, backend)
        self._ranks = Ranks(config, self.device) if share.size > 1 else None
        group = None if self._ranks is None else self._ranks.group
        with torch.inference_mode():
            tensors = checkpoint.stream(dtype=dtype, device=self.device, progress=progress)
            operations = replace(operations, call_rows=products.call_rows)
            self._decoder = Decoder(self._model, tensors, backend, quantization, group, operations)
            self._cache, self.graphs, num_blocks, max_model_len = make_cache(
                config, self._model, self._decoder, backend, dtype, self.device, num_threads, self._ranks
            )
        self._masks = MaskThread()
        self._step_work = StepWork(self._model)
        # The team waits for no thread that cannot run, so it may use them all; torch's threads would spin in its way.
        product = product_of(self.device, dtype, quantization)
        self._in_team = product.startswith("native") and dtype is torch.bfloat16
        free_cpus = (lambda: math.inf) if self._in_team else FreeCpus()
        self.choose_threads: Callable[[int], int] = partial(
            num_step_threads, max_threads=num_threads, free_cpus=free_cpus
        )
        """From the work of a step to the number of its threads."""
        self.min_rows = 1 if self._in_team else MIN_ROWS
        """A step with fewer rows is padded."""
        self.choose: Choose | None = None
        """What chooses the tokens; None: the fastest there is."""
        if products.are_invariant and self.device.type != "cpu":
            check_model(
                partial(self._logits_of, config.block_size), config, whole.vocab_size, num_blocks, max_model_len
            )
        num_probes = min(_PROBE_TOKENS, max_model_len)
        sample = self._sample_numbers(num_probes, config.block_size) if products.are_invariant else ""
        numbers = (self.device, dtype, quantization, backend, operations, products, share.size, self.graphs is not None)
        causes = numeric_causes(checkpoint.digest, whole, *numbers)
        self.info = EngineInfo(
            vocab_size=self._model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            device=str(self.device),
            dtype=str(dtype).removeprefix("torch."),
            attention_backend=backend.name,
            product=product,
            block_size=config.block_size,
            num_blocks=num_blocks,
            kv_cache_bytes=sum(layer.nbytes for layer in self._cache.layers) * share.size,
            max_num_seqs=config.max_num_seqs,
            max_num_queued_reqs=config.max_num_queued_reqs,
            fingerprint=fingerprint(causes, sample),
            batch_invariant=products.are_invariant,
        )
        _log_model(self.info)

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch's tokens, store their keys and values, and sample for the items that need it."""
        if self.device.type != "cpu":
            return self._run(batch)
        before = torch.get_num_threads()
        num_threads = self.choose_threads(self._step_work.of(batch))
        torch.set_num_threads(1 if self._in_team else num_threads)
        native.set_num_threads(num_threads)
        try:
            return self._run(batch)
        finally:
            torch.set_num_threads(before)  # the process may compute something else between steps

    @torch.inference_mode()
    def _run(self, batch: ScheduledBatch) -> StepResult:
        masks = self._masks.begin(batch)
        logits = None if self.graphs is None else self.graphs.logits(batch)
        if logits is not None:
            return StepResult(self._sample(logits, batch, {} if masks is None else masks.result()), {})
        inputs, hidden = self._compute(batch, self.info.block_size, self.min_rows)
        starts, rows_R = inputs.metadata.query_starts, inputs.sampled_R
        if len(rows_R):
            logits = self._decoder.logits(hidden[rows_R])
        return StepResult(
            sampled=self._sample(logits, batch, {} if masks is None else masks.result()),
            prompt_logprobs={
                i: self._prompt_logprobs(hidden[starts[i] : starts[i + 1]], item)
                for i, item in enumerate(batch.items)
                if item.sequence.request.params.prompt_logprobs is not None and not item.sequence.num_generated
            },
        )

    def _compute(self, batch: ScheduledBatch, block_size: int, min_rows: int) -> tuple[ModelInput, Tensor]:
        """Return the step's tensors and hidden states, computed by all ranks."""
        arrays = build_arrays(batch, block_size, min_rows)
        with nullcontext() if self._ranks is None else self._ranks.step(arrays):
            inputs = model_input(arrays, self.device)
            metadata = inputs.metadata
            return inputs, self._decoder.hidden_states(inputs.token_ids_T, inputs.positions_T, self._cache, metadata)

    def _sample_numbers(self, num_tokens: int, block_size: int) -> str:
        """Return the digest of the logits of a fixed prompt; call it before any sequence owns a block."""
        token_ids = [i % self._model.vocab_size for i in range(num_tokens)]
        request = Request("probe", tuple(token_ids), SamplingParams(), seed=0)
        block_ids = list(range(-(-num_tokens // block_size)))
        sequence = SequenceState(request=request, arrival=0, token_ids=token_ids, block_ids=block_ids)
        batch = ScheduledBatch((ScheduledSequence(sequence, num_tokens),))
        return digest_of(self._logits_of(block_size, batch, slice(num_tokens)))

    @torch.inference_mode()
    def _logits_of(self, block_size: int, batch: ScheduledBatch, rows: slice) -> Tensor:
        """Return the logits of these rows of a step."""
        hidden = self._compute(batch, block_size, MIN_ROWS)[1][rows]
        return self._decoder.logits(pad(hidden, (0, 0, 0, max(0, MIN_ROWS - len(hidden)))))[: len(hidden)]

    def _sample(self, logits: Tensor | None, batch: ScheduledBatch, masks: Masks) -> tuple[SampledTokens, ...]:
        positions: list[SamplingPosition] = []
        sizes: list[int] = []
        for item in batch.items:
            if item.needs_sampling:
                size = 1 + len(item.draft)
                sizes.append(size)
                allowed: Sequence[Mask | None] = masks.get(item.sequence) or [None] * size
                positions += [SamplingPosition(item.sequence, item.draft[:i], allowed[i]) for i in range(size)]
        if logits is None:
            return ()
        return tuple(sample(logits, positions, self.info.eos_token_ids, self.choose).split(sizes))

    def _prompt_logprobs(self, hidden: Tensor, item: ScheduledSequence) -> list[tuple[int, TokenLogprobs]]:
        """Return (position, logprobs) of the prompt tokens that the item's rows predict."""
        sequence, first = item.sequence, item.sequence.num_computed
        num_top = sequence.request.params.prompt_logprobs
        assert num_top is not None
        last = min(first + item.num_tokens, sequence.num_prompt_tokens - 1)
        entries: list[tuple[int, TokenLogprobs]] = []
        for start in range(first, last, LOGIT_ROWS):
            positions = range(start + 1, min(start + LOGIT_ROWS, last) + 1)
            rows = hidden[positions[0] - 1 - first : positions[-1] - first]
            logits = self._decoder.logits(pad(rows, (0, 0, 0, max(0, self.min_rows - len(rows)))))[: len(rows)]
            (targets,) = to_device(self.device, np.array(sequence.token_ids[positions[0] : positions[-1] + 1]))
            entries += zip(positions, top_logprobs(logits, targets, [num_top] * len(positions)), strict=True)
        return entries


def _log_model(info: EngineInfo) -> None:
    logger.debug(
        "model: dtype=%s device=%s attention=%s batch_invariant=%s fingerprint=%s",
        *(info.dtype, info.device, info.attention_backend, "yes" if info.batch_invariant else "no", info.fingerprint),
    )


def _check_max_model_len(config: EngineConfig, max_position: int) -> None:
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise InvalidConfigurationError(
            f"max_model_len must be at most the model's context of {max_position} tokens, got {config.max_model_len}"
        )
