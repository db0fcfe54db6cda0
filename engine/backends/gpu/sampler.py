"""Tokens chosen on a GPU by the kernels of kernels/sampling.py: this file stages their inputs and launches them.

A draw is one sequence of kernels for any requests of the same number of rows and kind: what they ask for lies in a
table. So graphs.py can record it. What changes single tokens or masks some comes before, and only for rows that
ask for it. With TRITON_INTERPRET=1 in the environment the kernels run on a CPU, far too slowly for anything but tests.
`choose_sampler` makes it and compares it with reference/draw.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.backends.gpu.token_counts import DeviceCounts, News
from gptserve.engine.backends.reference.adjustments import Entries, bias_and_ban
from gptserve.engine.backends.reference.draw import choose_by_torch
from gptserve.engine.sampling.choice import Choice
from gptserve.engine.staging import Array, to_device

PIECE = 4096
"""Entries of a piece of a row: at a batch of 1 a vocabulary of 128,000 has 32 programs."""
_TILE = 256
"""Entries that are compared with all digits at once: 16 64-bit sums of each take 32 registers of 256 threads."""
_COLUMNS, _SOURCE = 8, 5
_LEVELS, _MEASURES = 8, 512

Kind = Literal["plain", "top_p", "all"]
"""What the rows of a draw may ask for: no filter; top_p and min_p; top_k, too."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Draw = Callable[[Tensor, Kind], Tensor]
"""From fp32 logits [rows, vocab] and what was staged to the token id (int64 [rows]) per row."""


class TritonSampler:
    """Chooses tokens as choose_by_torch does, which takes steps of more than `max_rows` rows.

    Its scratch stays where it is: 4 * max_rows * vocab bytes hold the adjusted scores and then, in their place, the
    weights.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, piece: int = PIECE) -> None:
        """Load the kernels; they are compiled when they are first called. Raises ImportError without Triton.

        `piece` is a power of two from 256 on; the tokens do not depend on it.
        """
        import triton

        from gptserve.engine.backends.gpu.kernels import sampling as triton_kernels

        self._kernels = triton_kernels
        self.build = f"triton {triton.__version__}"
        self._allocate(vocab_size, max_rows, device, piece)

    def _allocate(self, vocab_size: int, max_rows: int, device: torch.device, piece: int) -> None:
        self.max_rows, self._vocab_size, self._device, self._piece = max_rows, vocab_size, device, piece
        self._num_pieces = -(-vocab_size // piece)
        self.counts = DeviceCounts(vocab_size, max_rows, device)
        pieces = max_rows, self._num_pieces
        self._scores = torch.zeros(max_rows, vocab_size, device=device)
        self._table = torch.full((max_rows, _COLUMNS), -1.0, dtype=torch.float64, device=device)  # padding
        self._peaks = torch.zeros(pieces, device=device)
        self._sums, self._kept_sums = (torch.zeros(pieces, dtype=torch.int64, device=device) for _ in range(2))
        self._measures = torch.zeros(max_rows, _MEASURES, dtype=torch.int64, device=device)
        self._floors = torch.zeros(max_rows, device=device)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._no_counts = torch.zeros(1, dtype=torch.int32, device=device)

    def choose(
        self, logits: Tensor, choices: Sequence[Choice], draw: Draw | None = None, num_rows: int | None = None
    ) -> Tensor:
        """Return a token id (int64) per row of fp32 logits; -1 for a row that is not finite. A Choose.

        `draw` replaces `self.draw`, and draws `num_rows` rows, of which those behind the choices are padding.
        """
        num_rows = num_rows or len(choices)
        if num_rows > self.max_rows:  # of drafts that are longer than the engine's own
            return choose_by_torch(logits, choices)
        assert logits.dtype is torch.float32 and logits.stride(1) == 1
        columns = list(zip(*choices))[:_SOURCE]  # noqa: B905 - all are as long
        table = np.zeros((num_rows, _COLUMNS))
        table[len(choices) :, _SOURCE] = -1
        table.T[:_SOURCE, : len(choices)] = columns
        penalized = self._stage(logits, choices, table)
        token_ids = (draw or self.draw)(logits[:num_rows], kind_of(choices))[: len(choices)].clone()
        if penalized is not None:
            rows_C, seats_C = penalized
            self.counts.add_sampled(seats_C, token_ids[rows_C])
        return token_ids

    def draw(self, logits: Tensor, kind: Kind) -> Tensor:
        """Draw from logits, or from adjusted scores where the table says so. This is what a graph records."""
        num_rows, stride = len(logits), logits.stride(0)
        grid, numbers = (num_rows, self._num_pieces), {"VOCAB": self._vocab_size, "PIECE": self._piece}
        padded = {**numbers, "PADDED": 1 << (self._num_pieces - 1).bit_length()}
        scores, table, sums, measures = self._scores, self._table, self._sums, self._measures
        kernels, num_pieces = self._kernels, self._num_pieces
        kernels.find_peaks[grid](logits, scores, table, self._peaks, stride, **numbers)
        kernels.weigh[grid](logits, scores, table, self._peaks, sums, measures, stride, **padded)
        searches = {"plain": (), "top_p": (True,), "all": (False, True)}[kind]
        for by_mass in searches:
            for level in range(_LEVELS):
                kernels.narrow[grid](
                    *(scores, table, sums, measures, num_pieces, level),
                    **{"BY_MASS": by_mass, "TILE": _TILE, **padded},
                    num_warps=8,
                )
        if searches:
            sums = self._kept_sums
            kernels.drop[grid](scores, table, self._sums, sums, self._floors, measures, num_pieces, **padded)
        arguments = scores, table, sums, self._floors, self._token_ids, num_pieces
        kernels.pick[num_rows,](*arguments, **padded, IS_FILTERED=bool(searches), num_warps=8)
        return self._token_ids[:num_rows]

    def _stage(self, logits: Tensor, choices: Sequence[Choice], table: Array) -> tuple[Tensor, Tensor] | None:
        """Copy the table, and what adjustments need, in one go; compute the scores of rows that have any.

        Return the rows whose tokens are to be counted, with their seats; None if there are none.
        """
        adjusted = [row for row, (*_, allowed, by) in enumerate(choices) if allowed is not None or by is not None]
        penalized = {row: by.before for row in adjusted if (by := choices[row].adjustment) and by.before.known}
        if not penalized:
            self.counts.release_if_unused()
        if not adjusted:
            (table_R8,) = to_device(self._device, table)
            self._table[: len(table)].copy_(table_R8)
            return None
        table[adjusted, _SOURCE] = 1
        seats, news, alone = self.counts.seat(list(penalized.values())) if penalized else _NO_SEATS
        rows = list(penalized)
        seat_of, counted = dict(zip(rows, seats, strict=True)), [rows[index] for index in alone]
        staged = to_device(
            self._device,
            *(table, *news, *_adjustment_arrays(choices, adjusted, seat_of), *_entries(choices, self._vocab_size)),
            *(np.array(counted, np.int64), np.array([seat_of[row] for row in counted], np.int64)),
        )
        self._table[: len(table)].copy_(staged[0])
        if penalized:
            self.counts.update(*staged[1:4])
        self._adjust(logits, *staged[4:7])
        bias_and_ban(self._scores, *staged[7:11])
        return (staged[11], staged[12]) if counted else None

    def _adjust(self, logits: Tensor, table_A8: Tensor, drafts: Tensor, masks: Tensor) -> None:
        counts = self._no_counts if self.counts.words is None else self.counts.words
        self._kernels.adjust[len(table_A8), self._num_pieces](
            *(logits, self._scores, table_A8, counts, drafts, masks, logits.stride(0)),
            # The same words without masks, or the kernel would be compiled anew.
            **{"VOCAB": self._vocab_size, "WORDS": -(-self._vocab_size // 32), "PIECE": self._piece},
            enable_fp_fusion=False,  # each step rounds, as on a CPU
            num_warps=8,
        )


_NO_SEATS = list[int](), News(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32)), list[int]()


def kind_of(choices: Sequence[Choice]) -> Kind:
    """Return the first kind that has all filters of the choices."""
    if any(choice.top_k for choice in choices):
        return "all"
    return "top_p" if any(choice.top_p < 1.0 or choice.min_p for choice in choices) else "plain"


def _adjustment_arrays(
    choices: Sequence[Choice], adjusted: Sequence[int], seat_of: Mapping[int, int]
) -> tuple[Array, Array, Array]:
    """Return the table, drafts and masks of the kernel `adjust`, for the rows that it adjusts."""
    table, drafts, masks = np.zeros((len(adjusted), _COLUMNS)), list[int](), list[Array]()
    for entry, row in zip(table, adjusted, strict=True):
        *_, allowed, by = choices[row]
        entry[:4] = row, seat_of.get(row, -1), -1 if allowed is None else len(masks), 1.0
        if allowed is not None:
            masks.append(allowed)
        if by is not None:
            entry[3:] = by.repetition, by.frequency, by.presence, len(drafts), len(drafts) + len(by.before.draft)
            drafts += by.before.draft
    # No array is empty, as kernels get their addresses.
    packed = np.stack(masks).view(np.int32) if masks else np.zeros((1, 1), np.int32)
    return table, np.array([*drafts, -1], np.int64), packed


def _entries(choices: Sequence[Choice], vocab_size: int) -> Iterator[Array]:
    """Yield the arrays of bias_and_ban."""
    biased, banned = Entries(vocab_size), Entries(vocab_size)
    for row, choice in enumerate(choices):
        if (by := choice.adjustment) is not None:
            biased.add(row, by.biased, by.bias)
            banned.add(row, by.banned)
    yield from biased.arrays()
    yield from banned.arrays()
