"""How often each token stands in a sequence, on a GPU: what token_counts.py keeps on the host, for penalties.

A sequence with penalties has a seat, a row of one tensor. A step adds the tokens that it samples to it, where they are,
so the host sends a sequence's tokens once, and after that only those that drafts brought. So the host need not know the
newest token when it plans the next step (overlap.py). gpu/sampler.py calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore
from gptserve.engine.staging import Array


class News(NamedTuple):
    """What the counts lack before a step. All are int64 but the amounts, int32."""

    fresh: Array
    """Seats that count nothing yet."""
    places: Array
    """In the flat words; one may occur several times."""
    amounts: Array


@dataclass(slots=True)
class _Seat:
    """A row of the tensor, and how many tokens of its sequence it counts once its latest step has been computed.

    num_due: how many tokens the sequence knows once its latest step is done; if it knows fewer, that was abandoned.
    """

    row: int
    num_counted: int = 0
    num_due: int = 0


class DeviceCounts:
    """The counts of the sequences that are sampled with penalties, at most `num_seats` in one step.

    words (int32 [seats, vocab]) is twice how often a token was generated, plus 1 if it is in the prompt. It exists
    while such a sequence lives, and takes 4 * seats * vocab bytes. A sequence loses its seat when it ends, or when
    others need it in a step that has no token of it; it is then counted anew.

    `seat` is the host's part of a step, and changes no tensor. `update` and `add_sampled` are the device's, in this
    order, and do not wait.
    """

    def __init__(self, vocab_size: int, num_seats: int, device: torch.device) -> None:
        self._vocab_size, self._num_seats, self._device = vocab_size, num_seats, device
        self._seats: WeakKeyDictionary[TokenCounts, _Seat] = WeakKeyDictionary()
        self.words: Tensor | None = None

    def seat(self, sequences: Sequence[TokensBefore]) -> tuple[list[int], News, list[int]]:
        """Give each sequence a seat; return the seats, what `update` must get before they count all known tokens, and
        the indices of the sequences whose token `add_sampled` must get.

        A sequence may stand in several rows, with other drafts: all get one seat. Drafts are not counted, nor is what
        these rows sample, as the sequence may not get it. A foreseen token is counted by the step that samples it.
        """
        self.reserve()
        num_rows_of = Counter(before.kept for before in sequences)
        distinct = {before.kept: before.known for before in sequences}
        free_rows = self._free_rows(distinct)
        for kept in distinct:
            if kept not in self._seats:
                self._seats[kept] = _Seat(next(free_rows))
        fresh, places, amounts = list[int](), [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for kept, known in distinct.items():
            seat = self._seats[kept]
            if len(known) < seat.num_due:  # its latest step was abandoned
                seat.num_counted = 0
            if not seat.num_counted:
                fresh.append(seat.row)
            its_places, its_amounts = self._lacking(seat, known, kept.num_prompt_tokens)
            places.append(its_places)
            amounts.append(its_amounts)
            seat.num_due = len(known) + 1
            seat.num_counted = len(known) + (num_rows_of[kept] == 1)
        news = News(np.array(fresh, np.int64), np.concatenate(places), np.concatenate(amounts))
        alone = [index for index, before in enumerate(sequences) if num_rows_of[before.kept] == 1]
        return [self._seats[before.kept].row for before in sequences], news, alone

    def update(self, fresh: Tensor, places: Tensor, amounts: Tensor) -> None:
        """Take News, as tensors of the device."""
        assert self.words is not None
        if len(fresh):
            self.words.index_fill_(0, fresh, 0)
        if len(places):
            self.words.view(-1).scatter_add_(0, places, amounts)

    def add_sampled(self, seats_C: Tensor, token_ids_C: Tensor) -> None:
        """Add the token (int64, -1 for none) that the step samples for each of these seats, all distinct."""
        assert self.words is not None
        places = seats_C * self._vocab_size + token_ids_C.clamp(min=0)
        self.words.view(-1).scatter_add_(0, places, (2 * (token_ids_C >= 0)).int())

    def reserve(self) -> None:
        """Make room for all seats, if there is none."""
        if self.words is None:
            self.words = torch.empty(self._num_seats, self._vocab_size, dtype=torch.int32, device=self._device)

    def release_if_unused(self) -> None:
        """Give the memory back if no sequence has a seat."""
        if not self._seats:
            self.release()

    def release(self) -> None:
        """Give the memory back. All sequences are then counted anew."""
        self._seats.clear()
        self.words = None

    def _free_rows(self, wanted: Mapping[TokenCounts, object]) -> Iterator[int]:
        """Yield the rows that no sequence has, then those of sequences that are not wanted now, which lose them."""
        owners = {seat.row: kept for kept, seat in self._seats.items()}
        yield from (row for row in range(self._num_seats) if row not in owners)
        for row, kept in owners.items():
            if kept not in wanted:
                del self._seats[kept]
                yield row

    def _lacking(self, seat: _Seat, known: list[int], num_prompt_tokens: int) -> tuple[Array, Array]:
        """Return the tokens that a seat lacks, as places in the flat words and amounts."""
        new = np.array(known[seat.num_counted :], np.int64)
        assert new.min(initial=0) >= 0, "a foreseen token follows one that the sequence's seat counts"
        amounts = np.full(len(new), 2, np.int32)
        if not seat.num_counted:
            prompt = np.unique(new[:num_prompt_tokens])
            new = np.concatenate([prompt, new[num_prompt_tokens:]])
            amounts = np.concatenate([np.ones(len(prompt), np.int32), amounts[num_prompt_tokens:]])
        return new + seat.row * self._vocab_size, amounts
