"""How often each token stands in a sequence, on a GPU: what token_counts.py keeps on the host, for penalties.

A sequence with penalties has a seat, a row of one tensor. A step adds the tokens that it samples to it, where they are,
so the host sends a sequence's tokens once, and after that only those that drafts brought. triton_sampler.py calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore
from gptserve.engine.staging import Array


@dataclass(slots=True)
class _Seat:
    """A row of the tensor, and how many tokens of its sequence it counts, among them what the last step sampled."""

    row: int
    num_counted: int = 0


class DeviceCounts:
    """The counts of the sequences that are sampled with penalties.

    words (int32 [seats, vocab]) is twice how often a token was generated, plus 1 if it is in the prompt. It exists
    while such a sequence lives, has as many seats as one step has needed, rounded up to a power of two, and takes
    4 * vocab bytes for each. A sequence loses its seat when it ends, or when others need it in a step that has no token
    of it; it is then counted anew.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._seats: WeakKeyDictionary[TokenCounts, _Seat] = WeakKeyDictionary()
        self.words: Tensor | None = None

    def seat(self, sequences: Sequence[TokensBefore]) -> tuple[list[int], Array, Array]:
        """Give each sequence a seat; return the seats, and what `add` must get before they count all known tokens.

        A sequence may stand in several rows, with other drafts: all get one seat. Drafts are not counted.
        """
        distinct = {before.kept: before.known for before in sequences}
        if self.words is None or len(distinct) > len(self.words):
            self.reserve(len(distinct))
        for kept in distinct:
            if kept not in self._seats:
                self._seats[kept] = _Seat(self._free_row(distinct))
        places, amounts = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for kept, known in distinct.items():
            its_places, its_amounts = self._news(self._seats[kept], known, kept.num_prompt_tokens)
            places.append(its_places)
            amounts.append(its_amounts)
        return [self._seats[before.kept].row for before in sequences], np.concatenate(places), np.concatenate(amounts)

    def reserve(self, num_seats: int) -> None:
        """Make room for so many sequences at once. All are then counted anew."""
        self.release()
        shape = 1 << (num_seats - 1).bit_length(), self._vocab_size
        self.words = torch.zeros(shape, dtype=torch.int32, device=self._device)

    def release_if_unused(self) -> None:
        """Give the memory back if no sequence has a seat."""
        if not self._seats:
            self.release()

    def release(self) -> None:
        """Give the memory back. All sequences are then counted anew."""
        self._seats.clear()
        self.words = None

    def add(self, places: Tensor, amounts: Tensor) -> None:
        """Add to the flat words, without waiting; a place may occur several times."""
        assert self.words is not None
        self.words.view(-1).scatter_add_(0, places, amounts)

    def add_sampled(self, sequences: Sequence[TokensBefore], seats_C: Tensor, token_ids_C: Tensor) -> None:
        """Add the token (int64, -1 for none) that the step samples for each of these sequences, all distinct.

        It is known to be the next token of the sequence, unless that ends or the step is abandoned.
        """
        self.add(seats_C * self._vocab_size + token_ids_C.clamp(min=0), (2 * (token_ids_C >= 0)).int())
        for before in sequences:
            self._seats[before.kept].num_counted += 1

    def _free_row(self, wanted: dict[TokenCounts, list[int]]) -> int:
        """Return a row that no sequence has, or that of one that is not wanted now."""
        assert self.words is not None
        taken = {seat.row: kept for kept, seat in self._seats.items()}
        free = next((row for row in range(len(self.words)) if row not in taken), None)
        if free is not None:
            return free
        row, kept = next((row, kept) for row, kept in taken.items() if kept not in wanted)
        del self._seats[kept]
        return row

    def _news(self, seat: _Seat, known: list[int], num_prompt_tokens: int) -> tuple[Array, Array]:
        """Return what a seat lacks, as places in the flat words and amounts."""
        assert self.words is not None
        if not 0 < seat.num_counted <= len(known):  # a new seat, or the step that sampled the last token was abandoned
            self.words[seat.row].zero_()
            seat.num_counted = 0
        new = np.array(known[seat.num_counted :], np.int64)
        amounts = np.full(len(new), 2, np.int32)
        if not seat.num_counted:
            prompt = np.unique(new[:num_prompt_tokens])
            new = np.concatenate([prompt, new[num_prompt_tokens:]])
            amounts = np.concatenate([np.ones(len(prompt), np.int32), amounts[num_prompt_tokens:]])
        seat.num_counted = len(known)
        return new + seat.row * self._vocab_size, amounts
