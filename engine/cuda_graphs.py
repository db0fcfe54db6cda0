"""Decoding steps on a GPU as CUDA graphs: one call starts all kernels from the embedding to the logits, one those from
the logits to the tokens.

A graph repeats kernels with the addresses and sizes that they were recorded with. So there is one for each of a few
batch sizes, to which a step is padded, and the inputs lie in tensors that stay where they are. A row of padding is a
sequence of one token with slot -1: it stores nothing, and nobody reads its logits. Between the two graphs comes what
depends on the requests: penalties, bias, bans and masks. Steps with prompts or drafts are computed without graphs.

step_memory.py makes the graphs, ModelRunner asks them for logits and tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.attention import AttentionBackend, AttentionMetadata
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.batch import build_arrays, known_token_ids
from gptserve.engine.model.decoder import Decoder
from gptserve.engine.model.kv_cache import KVCache
from gptserve.engine.model.linear import MIN_ROWS
from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.sampling.native_draw import Choice
from gptserve.engine.sampling.sampler import Choose
from gptserve.engine.sampling.triton_sampler import KINDS, Kind, TritonSampler
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.staging import to_device
from gptserve.weights.config import ModelConfig

logger = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Records what a function starts on the device. What it returns does the same again and returns the same tensor."""


class CudaCapture:
    """The Capture of CUDA. Its graphs share one pool of memory, as no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """The logits and draws of decoding steps, recorded for each size of `batch_sizes`."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        config: EngineConfig,
        max_model_len: int,
        device: torch.device,
        capture: Capture,
        sampler: TritonSampler | None = None,
    ) -> None:
        self._cache, self._block_size, self._max_model_len = cache, config.block_size, max_model_len
        self._sampler = sampler
        # The largest first: the others find room in the memory that it needs between its kernels.
        self._steps = [
            _Step(size, decoder, cache, config.block_size, max_model_len, device, capture)
            for size in reversed(batch_sizes(config.max_num_seqs))
        ]
        self._latest = self._steps[0]
        if sampler is not None:
            for step in self._steps:
                step.record_draws(sampler, capture)

    @property
    def choose(self) -> Choose | None:
        """Chooses from the logits that `logits` returned last; None without a sampler whose draws can be recorded.

        It is no attribute, as an object that holds its own method is freed only when garbage is collected.
        """
        return None if self._sampler is None else self._choose

    def logits(self, batch: ScheduledBatch, chosen_R: Tensor | None = None) -> Tensor | None:
        """Return fp32 logits, a row for each sequence and then padding; None unless all sequences decode.

        They are valid until the next call. Foreseen tokens are taken from chosen_R, the ids of the step before.
        """
        if not all(map(_decodes, batch.items)):
            return None
        self._latest = next(step for step in reversed(self._steps) if step.size >= len(batch.items))
        self._latest.fill(batch, chosen_R)
        return self._latest.replay()

    def _choose(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        assert self._sampler is not None
        return self._sampler.choose(self._latest.logits, choices, self._latest.draw, self._latest.size)

    def disagreement(self, vocab_size: int) -> str | None:
        """Return in which size a graph gives other bits or tokens than its kernels started one by one, or None.

        Call it before any sequence owns a block.
        """
        for step in self._steps:
            batch = ScheduledBatch(tuple(self._probes(step.size, vocab_size)))
            step.fill(batch)
            expected = step.compute()[: len(batch.items)].view(torch.int32).clone()  # bits, as NaN equals nothing
            for layer in self._cache.layers:
                layer.zero_()  # so that a graph that stores nothing is seen
            if not torch.equal(step.replay()[: len(batch.items)].view(torch.int32), expected):
                return f"they give other logits for a batch of {step.size}"
            if self._sampler is not None and not _draws_agree(step, self._sampler, len(batch.items)):
                return f"they give other tokens for a batch of {step.size}"
        return None

    def _probes(self, num_seqs: int, vocab_size: int) -> Iterator[ScheduledSequence]:
        """Yield sequences that share blocks, each at the position after the one before; fewer in a small cache."""
        length = min(self._block_size, self._max_model_len)
        request = Request("probe", (), SamplingParams(), seed=0)
        for i in range(min(num_seqs, self._cache.layers[0].shape[1] * length)):
            position, token_id = i % length, (7 * i + 3) % vocab_size
            known = [token_id] * (position + 1)
            sequence = SequenceState(request, 0, known, num_computed=position, block_ids=[i // length])
            yield ScheduledSequence(sequence, 1)


def _draws_agree(step: _Step, sampler: TritonSampler, num_rows: int) -> bool:
    """Whether the recorded draws choose the tokens that the sampler does, at a heat where each noise has its own."""
    filters: dict[Kind, Choice] = {"plain": Choice(), "top_p": Choice(top_p=0.9), "all": Choice(top_k=50, top_p=0.9)}
    for noise in (0.1, 0.5, 0.9):
        for kind in KINDS:
            choices = [filters[kind]._replace(noise=noise, temperature=1e3)] * num_rows
            expected = sampler.choose(step.logits, choices, num_rows=step.size)
            if not torch.equal(sampler.choose(step.logits, choices, step.draw, step.size), expected):
                return False
    return True


def _decodes(item: ScheduledSequence) -> bool:
    """Whether the item is one row, and a token of the completion comes before the one that it samples."""
    return item.num_tokens == 1 and item.needs_sampling and item.sequence.num_generated > 0


class _Step:
    """A decoding step of `size` rows. `compute` starts its kernels one by one, `replay` all at once.

    `logits` are those of the last replay. `draw` draws from them, and starts its kernels all at once.
    """

    def __init__(
        self,
        size: int,
        decoder: Decoder,
        cache: KVCache,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.size, self._block_size, self._device = size, block_size, device
        self._rows_4B, self._tables_SN = to_device(
            device, _rows(size), np.zeros((size, -(-max_model_len // block_size)), np.int32)
        )
        starts = tuple(range(size + 1))
        (starts_S1,) = to_device(device, np.array(starts, np.int32))
        token_ids_T, positions_T, slots_T, lengths = self._rows_4B
        # The tuple is what tiles and pieces are counted by, so it has the longest contexts there may be.
        metadata = AttentionMetadata(
            *(starts, (max_model_len,) * size, starts_S1),
            *(lengths.view(torch.int32)[:size], self._tables_SN, slots_T),
        )

        def compute() -> Tensor:
            return decoder.logits(decoder.hidden_states(token_ids_T, positions_T, cache, metadata))

        self.compute: Callable[[], Tensor] = compute
        compute()  # compiles kernels and makes workspaces, which no recording may
        self._replay = capture(compute)
        self.logits = self._replay()
        self._draws: dict[Kind, Replay] = {}

    def replay(self) -> Tensor:
        self.logits = self._replay()
        return self.logits

    def record_draws(self, sampler: TritonSampler, capture: Capture) -> None:
        """Record a draw of each kind."""
        for kind in KINDS:
            sampler.draw(self.logits, kind)  # compiles kernels
            self._draws[kind] = capture(partial(self._drawn, sampler, kind))

    def _drawn(self, sampler: TritonSampler, kind: Kind) -> Tensor:
        return sampler.draw(self.logits, kind)

    def draw(self, logits: Tensor, kind: Kind) -> Tensor:
        """Draw for the logits of the last replay."""
        return self._draws[kind]()

    def fill(self, batch: ScheduledBatch, chosen_R: Tensor | None = None) -> None:
        """Put the inputs of a step of at most `size` rows where the graph reads them: one copy from the host.

        Rows of padding read the block that was last at their place in the table.
        """
        token_ids, positions, _, _, kv_lens, tables, slots = build_arrays(batch, self._block_size, self.size)
        num_seqs, width = tables.shape
        rows = _rows(self.size)
        rows[:3] = token_ids, positions, slots
        rows[3].view(np.int32)[:num_seqs] = kv_lens
        rows_4B, tables_SN = to_device(self._device, rows, tables)
        if chosen_R is not None and token_ids.min() < 0:
            rows_4B[0] = known_token_ids(rows_4B[0], chosen_R)
        self._rows_4B.copy_(rows_4B)
        self._tables_SN[:num_seqs, :width].copy_(tables_SN)


def _rows(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the inputs of rows of padding: token ids, positions, slots and, as int32, lengths."""
    rows = np.zeros((4, size), np.int64)
    rows[2] = -1
    rows[3].view(np.int32)[:size] = 1
    return rows


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of batches that have a graph, ascending: powers of two, and the largest batch.

    Up to some hundred rows a step takes as long as reading its weights, so rows of padding cost little. The smallest is
    MIN_ROWS, to which all steps are padded.
    """
    sizes = [MIN_ROWS]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return sizes


def capture_decoding(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    backend: AttentionBackend,
    cache: KVCache,
    max_model_len: int,
    device: torch.device,
    capture: Capture | None = None,
    sampler: TritonSampler | None = None,
) -> DecodeGraphs | None:
    """Return the graphs, or None with a warning where they cannot be made or give other bits.

    None without a word on a CPU, and where the configuration wants none.
    """
    if config.enforce_eager or (device.type != "cuda" and capture is None):
        return None
    found = _obstacle(config, decoder, backend)
    if found is None:
        try:
            graphs = DecodeGraphs(decoder, cache, config, max_model_len, device, capture or CudaCapture(), sampler)
            found = graphs.disagreement(model.vocab_size)
            if found is None:
                return graphs
        except Exception as error:  # of a driver or a library that no test has seen: steps without graphs need none
            found = f"they failed with {type(error).__name__}: {error}"
    logger.warning("decoding: kernels started one by one, which is slower, are used instead of CUDA graphs: %s", found)
    return None


def _obstacle(config: EngineConfig, decoder: Decoder, backend: AttentionBackend) -> str | None:
    """Return why steps of this model cannot be recorded; None if they can."""
    if config.tensor_parallel_size > 1:
        return "the ranks of a tensor-parallel engine start their kernels one by one"
    if decoder.host_starts_experts:
        return "the host starts the experts of each step"
    if backend.name == "reference":
        return "attention is 'reference', which the host steers by the lengths of the sequences"
    return None
