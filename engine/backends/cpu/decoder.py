"""The decoder as a program of engine/backends/cpu, which computes a step in one call, from token ids to logits.

It computes what decoder.py and layers.py define, with the same weights, without Python between the operations; the
order of a block's norms, parts and sums stands in layers.py, beside torch's. In bf16 it rounds where they do, but keeps
the residual stream in fp32. If all weights are integers, it also keeps in fp32 what norms and activations return:
products of integers quantize it anyway. Where no program can compute a model, `native_decoder` returns None, and those
two files compute it.
Decoder and program_steps.py call it. Shape letters as in engine/model/attention.py.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from gptserve.engine.backends.cpu.attention import CpuAttention
from gptserve.engine.backends.cpu.buffers import buffer_widths, wide_kinds
from gptserve.engine.backends.cpu.draw import LogitsAt
from gptserve.engine.backends.cpu.obstacle import find_obstacle
from gptserve.engine.backends.cpu.program import Program
from gptserve.engine.backends.cpu.states import StateAddresses
from gptserve.engine.backends.cpu.writer import Writer
from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.model.activation import soft_cap
from gptserve.engine.model.attention import AttentionBackend, Cache
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.model.linear import Rows
from gptserve.engine.model.loading import StreamedTensors
from gptserve.engine.model.rotary import rotations_of
from gptserve.weights.config import ModelConfig
from gptserve.weights.torch_threads import torch_threads

logger = logging.getLogger(__name__)


def native_decoder(
    config: ModelConfig,
    parts: StreamedTensors,
    embedding: Rows,
    positions: Tensor | None,
    tables: list[Tensor | None],
    backend: AttentionBackend,
) -> NativeDecoder | None:
    """Return a decoder that runs programs, or None if none can compute this model.

    `parts` has made all linears and norms. `positions` is the table that is added to the embedding; `tables` has the
    rotary table of each layer.
    """
    obstacle = find_obstacle(config, parts, backend)
    if parts.group is not None and obstacle is None:
        warn_of_fallback("decoder", "'torch', which is slower, is", "'program'", "a program has no ranks")
        return None
    if obstacle is not None:
        logger.debug("decoder: torch runs the operations of a step, not a program: %s", obstacle)
        return None
    assert isinstance(backend, CpuAttention)
    dtype = embedding.dtype
    widths = buffer_widths(config, dtype)
    kinds = wide_kinds(parts)
    wide = tuple(name for name in (*widths, "logits") if name.partition(" ")[0] in kinds)
    step, head = (Writer(config, parts, {**widths, "logits": config.vocab_size}, dtype, wide) for _ in range(2))
    step.begin(embedding, positions)
    for layer, rotations in enumerate(rotations_of(tables)):
        step.block(layer, rotations, backend)
    step.program.add("take", "x", "taken")
    for writer in (step, head):
        writer.head()
    dtypes = {name: torch.float32 if name in wide else dtype for name in widths}
    sizes = config.vocab_size, config.logit_softcap
    return NativeDecoder(widths, dtypes, *sizes, step.program, head.program, backend, has_states=config.has_states)


class NativeDecoder:
    """The program of a model's steps and that of its head alone, with their buffers; for one thread at a time."""

    def __init__(
        self,
        widths: dict[str, int],
        dtypes: dict[str, torch.dtype],
        vocab_size: int,
        softcap: float | None,
        step: Program,
        head: Program,
        backend: CpuAttention,
        *,
        has_states: bool,
    ) -> None:
        self._widths, self._dtypes, self._vocab_size, self._softcap = widths, dtypes, vocab_size, softcap
        self._step, self._head, self._backend = step, head, backend
        self._states = StateAddresses() if has_states else None
        self._buffers: dict[str, Tensor] = {}
        self._num_rows = self._num_logits = 0
        self._logits, self._logits_at = torch.empty(0), LogitsAt(0, vocab_size, vocab_size)
        """What `run` has computed; room for _num_logits rows."""

    def run(self, arrays: StepArrays, cache: Cache) -> LogitsAt:
        """Compute a step; return where the logits of its sampled rows lie, valid until the next call.

        It calls nothing of torch, for program_steps.py, but where its buffers grow and for a soft cap.
        """
        token_ids, positions, sampled, *of_attention, _ = arrays
        num_rows, num_sampled = len(token_ids), len(sampled)
        self._reserve(num_rows)
        if num_sampled > self._num_logits:
            self._num_logits, self._logits = 0, torch.empty(0)  # frees the old ones first
            self._logits = torch.empty(num_sampled, self._vocab_size)
            self._num_logits, self._logits_at = num_sampled, LogitsAt.of(self._logits)
        self._step.place("logits", self._logits_at.address)
        batch, caches = self._backend.step_data(cache.layers, *of_attention)
        of_tokens, taken = (token_ids.buffer_info()[0], positions.buffer_info()[0]), sampled.buffer_info()[0]
        of_states = self._states.of(cache.states, arrays) if self._states else ()
        self._step.run(num_rows, *of_tokens, batch, caches, num_sampled, taken, *of_states)
        if self._softcap is not None:
            _cap(self._logits[:num_sampled], self._softcap)
        return self._logits_at

    def sampled_logits(self, num_rows: int) -> Tensor:
        """Return the logits of the latest `run` as a tensor [num_rows, vocab_size], valid until the next one."""
        return self._logits[:num_rows]

    def hidden_states(self, num_rows: int) -> Tensor:
        """Return the last block's output of the latest `run`, fp32 [num_rows, hidden], valid until the next one."""
        return self._buffers["x"][:num_rows]

    def logits(self, rows: slice) -> Tensor:
        """Return the fp32 logits [rows, vocab_size] of consecutive rows of the latest `run`."""
        hidden = self._buffers["x"][rows]
        logits = torch.empty(len(hidden), self._vocab_size)
        self._head.place("logits", logits.data_ptr())
        self._head.place("taken", hidden.data_ptr())
        self._head.run(len(hidden))
        if self._softcap is not None:
            _cap(logits, self._softcap)
        return logits

    def _reserve(self, num_rows: int) -> None:
        """Make the buffers at least this many rows long; to the next power of two, so that they seldom grow."""
        if num_rows <= self._num_rows:
            return
        self._num_rows, self._buffers = 0, {}  # frees the old ones before the new ones are allocated
        size = 1 << (num_rows - 1).bit_length()
        for name, width in self._widths.items():
            buffer = self._buffers[name] = torch.empty(size, width, dtype=self._dtypes[name])
            self._step.place(name, buffer.data_ptr())
            self._head.place(name, buffer.data_ptr())
        self._num_rows = size


@torch.inference_mode()
def _cap(logits: Tensor, cap: float) -> None:
    """Cap the logits in place, on one thread: those of torch's pool would spin in the way of the library's team."""
    with torch_threads(1):
        logits.copy_(soft_cap(logits, cap))
