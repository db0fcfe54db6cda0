"""Decoding steps of one rank as CUDA graphs: one call starts all kernels of a step.

A graph repeats kernels with the addresses and sizes that they were recorded with. So there is one for each of a few
batch sizes, to which a step is padded, and the inputs lie in tensors that stay where they are. A row of padding is a
sequence of one token with slot -1: it stores nothing, and nobody reads its logits.

The ranks of an engine record together: what they send each other is recorded with the kernels, so a replay of one is a
replay of all, with as many rows. graphs.py makes those of the first rank, parallel/worker.py those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.device_loss import end_if_lost
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.attention import AttentionBackend, AttentionMetadata, Cache
from gptserve.engine.model.batch import model_input
from gptserve.engine.model.layout import Span, lay_out
from gptserve.engine.staging import Array, bytes_of, copy_into, to_device

_CONTEXT = 1000
"""Tokens of the longest context in which graphs are compared: many blocks, and some pieces of gpu/attention.py."""
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""How far two rows may be apart, by the dtype of the cache, as a share of a row's length. In 30 layers of random
weights bf16's rounding came to 5e-2, and a key too many or too few to 7e-2 or more."""

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Records what a function starts on the device. What it returns does the same again and returns the same tensor."""
Agree = Callable[[str | None], str | None]
"""Takes what keeps this rank from graphs, None if nothing does; returns what keeps one of the ranks. All call it."""


class Compute(Protocol):
    """What a rank computes of a step."""

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return [T, any width]; read nothing else that differs from step to step."""


class CudaCapture:
    """The Capture of CUDA. Its graphs share one pool of memory, as no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # torch leaves the stream of a recording current if its end fails, as it does where the recording has failed.
        # Other threads, such as the one that watches NCCL, may ask for their events meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def capture_of(device: torch.device) -> Capture | None:
    """Return the Capture of a device; None for a CPU, which has none."""
    return CudaCapture() if device.type == "cuda" else None


def obstacle(backend: AttentionBackend, *, host_starts_experts: bool) -> str | None:
    """Return why steps of a rank cannot be recorded; None if they can."""
    if host_starts_experts:
        return "the host starts the experts of each step"
    if backend.name == "reference":
        return "attention is 'reference', which the host steers by the lengths of the sequences"
    return None


def failure(error: Exception) -> str:
    """Return an obstacle: an error of a driver or a library that no test has seen, and the one before it, if any.

    A recording in which something failed fails again where it ends, which hides what it was. Raises EngineStartError if
    the device cannot go on.
    """
    end_if_lost("a CUDA graph", error, "enforce_eager")
    before = error.__context__
    after = "" if before is None else f", after {type(before).__name__}: {before}"
    return f"they failed with {type(error).__name__}: {error}{after}"


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of batches that have a graph, ascending: powers of two, and the largest batch.

    Up to some hundred rows a step takes as long as reading its weights, so rows of padding cost little.
    """
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return sizes


class RecordedSteps:
    """What a rank computes of decoding steps, recorded for each size of `batch_sizes`."""

    def __init__(
        self, compute: Compute, cache: Cache, config: EngineConfig, max_model_len: int, device: torch.device
    ) -> None:
        self._compute, self._device = compute, device
        self._cache, self._block_size, self._max_model_len = cache, config.block_size, max_model_len
        self._exact = config.batch_invariant
        sizes = batch_sizes(config.max_num_seqs)
        # The largest first: the others find room in the memory that it needs between its kernels.
        self.steps = [
            RecordedStep(size, compute, config.block_size, max_model_len, sizes[-1], device) for size in reversed(sizes)
        ]

    def of(self, num_seqs: int) -> RecordedStep:
        """Return the smallest step with a row for each of so many sequences."""
        return next(step for step in reversed(self.steps) if step.size >= num_seqs)

    def record(self, capture: Capture, agree: Agree) -> str | None:
        """Record all sizes; return what kept a rank from it, or None. The ranks meet between two recordings alone."""
        for step in self.steps:
            step.compute()  # compiles kernels, makes workspaces and connects ranks, which no recording may
            found = agree(step.record(capture))
            if found is not None:
                return found
            step.replay()
        return None

    def disagreement(
        self,
        vocab_size: int,
        agree: Agree,
        compare_more: Callable[[RecordedStep, int], str | None] = lambda step, num_rows: None,
    ) -> str | None:
        """Return in which size a graph of a rank gives other numbers than a step without one, or None.

        A replay must give the bits of its kernels started one by one. A step without graphs may launch attention
        otherwise, as the host knows its lengths: its numbers may differ by rounding, unless batch_invariant is set.
        Call it before any sequence owns a block. compare_more(step, rows) may find more after a replay.
        """
        for step in self.steps:
            probes = list(self._probes(step.size, vocab_size))
            arrays = lay_out(probes, self._block_size).as_numpy()
            inputs, num_rows = model_input(_padded(arrays, step.size), self._device), len(probes)
            compute = partial(self._compute, inputs.token_ids_T, inputs.positions_T, inputs.metadata)
            num_blocks, slots_R = len(probes[0].block_ids), inputs.metadata.slots_T[:num_rows]
            expected = self._results(compute, num_blocks, slots_R)
            step.fill(arrays)
            replayed, started = (self._results(of, num_blocks, slots_R) for of in (step.replay, step.compute))
            is_same = _have_same_bits(replayed, started) and self._are_same(started, expected)
            found = compare_more(step, num_rows) if is_same else f"they give other numbers for a batch of {step.size}"
            found = agree(found)
            if found is not None:
                return found
        return None

    def _probes(self, num_seqs: int, vocab_size: int) -> Iterator[Span]:
        """Yield the last tokens of sequences with contexts from the longest to one token, each in its own slot.

        They share their blocks. Each begins at another one, so that the table of another sequence gives other numbers.
        In a small cache there are fewer of them.
        """
        room = min(self._max_model_len, self._cache.layers[0].shape[1] * self._block_size, max(_CONTEXT, num_seqs))
        shared = list(range(-(-room // self._block_size)))[::-1]
        num_seqs = min(num_seqs, room)
        for i in range(num_seqs):
            position, token_id = room - 1 - i * (room - 1) // max(1, num_seqs - 1), (7 * i + 3) % vocab_size
            num_before = position // self._block_size
            block_ids = [*(shared[(i + j) % len(shared)] for j in range(num_before)), shared[num_before]]
            yield Span([token_id], position, block_ids, num_sampled=1)

    def _are_same(self, found: list[Tensor], expected: list[Tensor]) -> bool:
        return _have_same_bits(found, expected) or (not self._exact and _are_close(found, expected))

    def _results(self, compute: Callable[[], Tensor], num_blocks: int, slots_R: Tensor) -> list[Tensor]:
        """Return the rows of a step, and what each layer stores for them.

        All of these blocks are first filled with random numbers, the same at each call.
        """
        generator = torch.Generator(self._device).manual_seed(0)
        for layer in self._cache.layers:
            layer[:, :num_blocks].normal_(generator=generator)
        rows, places = compute()[: len(slots_R)].clone(), (slots_R // self._block_size, slots_R % self._block_size)
        return [rows, *(layer[:, places[0], :, places[1]] for layer in self._cache.layers)]  # [rows, 2, heads, size]


class RecordedStep:
    """A decoding step of `size` rows. `compute` starts its kernels one by one, `replay` all at once."""

    def __init__(
        self, size: int, compute: Compute, block_size: int, max_model_len: int, num_chosen: int, device: torch.device
    ) -> None:
        """Allocate its inputs; the step before it may choose `num_chosen` tokens."""
        self.size = size
        self._replay: Replay | None = None
        self.out = torch.empty(0)
        """What the last replay returned; the next one overwrites it."""
        self._padding_5B = _padding(size, num_chosen)
        tables = np.zeros((size, -(-max_model_len // block_size)), np.int32)
        memory = torch.zeros(8 * num_chosen + bytes_of(self._padding_5B, tables), dtype=torch.uint8, device=device)
        # The ids that the step before chose, and behind them those that the host knows: the graph looks both up.
        ids = memory[: 8 * (num_chosen + size)].view(torch.int64)
        self._chosen, self._staged = ids[:num_chosen], memory[8 * num_chosen :]
        (_, positions_T, slots_T, lengths, places_T), _ = copy_into(self._staged, self._padding_5B, tables)
        starts = tuple(range(size + 1))
        self._tables_SN, starts_S1 = to_device(device, tables, np.array(starts, np.int32))
        # The tuple is what tiles and pieces are counted by, so it has the longest contexts there may be.
        metadata = AttentionMetadata(
            *(starts, (max_model_len,) * size, starts_S1),
            *(lengths.view(torch.int32)[:size], self._tables_SN, slots_T),
        )
        self.compute: Callable[[], Tensor] = lambda: compute(ids[places_T], positions_T, metadata)

    def __del__(self) -> None:
        """Drop the graph before what it recorded: NCCL ends a group once no graph has it, and waits for that."""
        self._replay = None

    def record(self, capture: Capture) -> str | None:
        """Record `compute`, which has been called before; return why that failed, or None."""
        try:
            self._replay = capture(self.compute)
        except Exception as error:
            return failure(error)
        return None

    def replay(self) -> Tensor:
        assert self._replay is not None
        self.out = self._replay()
        return self.out

    def fill(self, arrays: tuple[Array, ...], chosen_R: Tensor | None = None) -> None:
        """Put StepArrays.as_numpy of at most `size` rows where the graph reads them: one copy from the host.

        Foreseen tokens are taken from chosen_R. Rows of padding read the block that was last at their place in the
        table.
        """
        token_ids, positions, _, _, kv_lens, tables, slots = arrays
        num_seqs, width = tables.shape
        rows = self._padding_5B.copy()
        rows[:3, :num_seqs] = token_ids, positions, slots
        rows[3].view(np.int32)[:num_seqs] = kv_lens
        is_foreseen = token_ids < 0
        np.copyto(rows[4, :num_seqs], ~token_ids, where=is_foreseen)
        _, tables_SN = copy_into(self._staged, rows, tables)
        self._tables_SN[:num_seqs, :width].copy_(tables_SN)
        if chosen_R is not None and is_foreseen.any():
            assert len(chosen_R) <= len(self._chosen)
            # A row that chose none, -1, gives the id 0: what follows is void.
            torch.clamp(chosen_R, min=0, out=self._chosen[: len(chosen_R)])


def _have_same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all bits are the same: of numbers a NaN would not equal itself."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in pair)) for pair in pairs)


def _are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether each row is what was expected, but for rounding."""
    for rows, expected_rows in zip(found, expected, strict=True):
        right = expected_rows.flatten(1).float()
        errors = torch.linalg.vector_norm(rows.flatten(1).float() - right, dim=1)
        if not (errors <= _ROUNDING[expected[-1].dtype] * torch.linalg.vector_norm(right, dim=1)).all():
            return False
    return True


def _padded(arrays: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """Return StepArrays.as_numpy with rows of padding up to `size`."""
    token_ids, positions, *others, slots = arrays
    missing = (0, size - len(slots))
    slots = np.pad(slots, missing, constant_values=-1)
    return np.pad(token_ids, missing), np.pad(positions, missing), *others, slots


def _padding(size: int, num_chosen: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the inputs of rows of padding: token ids, positions, slots, int32 lengths, and where their ids lie."""
    rows = np.zeros((5, size), np.int64)
    rows[2] = -1
    rows[3].view(np.int32)[:size] = 1
    rows[4] = num_chosen + np.arange(size)
    return rows
