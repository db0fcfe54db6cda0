"""Counts in a tensor against those of the host, whatever the order of steps, drafts, preemptions, failures and ends."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptserve.engine.sampling.device_counts import DeviceCounts
from gptserve.engine.sampling.token_counts import TokenCounts, TokensBefore

CPU = torch.device("cpu")
VOCAB = 6


class Sequences:
    """Live sequences whose tokens are random, and steps that sample some of them."""

    def __init__(self, data: st.DataObject) -> None:
        self._data, self.counts, self.live = data, DeviceCounts(VOCAB, CPU), list[TokensBefore]()

    def tokens(self, min_size: int, max_size: int) -> list[int]:
        return self._data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=min_size, max_size=max_size))

    def begin(self) -> None:
        """A request, or one that goes on after a restart: then it knows tokens of its completion already."""
        prompt = self.tokens(1, 4)
        self.live.append(TokensBefore(TokenCounts(len(prompt)), prompt + self.tokens(0, 3)))

    def end(self) -> None:
        if self.live:
            self.live.pop(self._data.draw(st.integers(0, len(self.live) - 1)))
            gc.collect()

    def step(self) -> None:
        """Sample a few; the others wait, or were preempted."""
        sampled = self._data.draw(st.lists(st.sampled_from(self.live), unique_by=id)) if self.live else []
        if not sampled:
            self.counts.release_if_unused()
            assert self.live or self.counts.words is None
            return
        drafts = [self.tokens(0, 2) for _ in sampled]
        rows = [
            before._replace(draft=tuple(draft[:i]))
            for before, draft in zip(sampled, drafts, strict=True)
            for i in range(len(draft) + 1)
        ]
        seats, places, amounts = self.counts.seat(rows)
        self.counts.add(torch.from_numpy(places), torch.from_numpy(amounts))
        self.check(rows, seats)
        self.accept(sampled, drafts, dict(zip((id(row.kept) for row in rows), seats, strict=True)))

    def check(self, rows: list[TokensBefore], seats: list[int]) -> None:
        assert self.counts.words is not None
        for row, seat in zip(rows, seats, strict=True):
            expected = np.zeros(VOCAB, np.int32)
            num_prompt = row.kept.num_prompt_tokens
            expected[list(set(row.known[:num_prompt]))] = 1
            for token, count in Counter(row.known[num_prompt:]).items():
                expected[token] += 2 * count
            assert self.counts.words[seat].tolist() == expected.tolist()
            of_host = TokensBefore(TokenCounts(num_prompt), row.known).counts()
            assert dict(zip(of_host.token_ids, of_host.counts, strict=True)) == {
                token: word >> 1 for token, word in enumerate(expected.tolist()) if word
            }

    def accept(self, sampled: list[TokensBefore], drafts: list[list[int]], seat_of: dict[int, int]) -> None:
        """Give each sequence its tokens, unless the step fails after it has counted them."""
        alone = [before for before, draft in zip(sampled, drafts, strict=True) if not draft]
        token_ids = self.tokens(len(alone), len(alone))
        if alone:
            seats_C = torch.tensor([seat_of[id(before.kept)] for before in alone])
            self.counts.add_sampled(alone, seats_C, torch.tensor(token_ids))
        if self._data.draw(st.booleans()):
            for before, token_id in zip(alone, token_ids, strict=True):
                before.known.append(token_id)
            for before, draft in zip(sampled, drafts, strict=True):
                if draft:
                    before.known.extend([*draft[: self._data.draw(st.integers(0, len(draft)))], *self.tokens(1, 1)])


@pytest.mark.parametrize("num", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_counts_of_the_device_are_those_of_the_host(num: int) -> None:
    @settings(max_examples=num)
    @given(st.data())
    def serve(data: st.DataObject) -> None:
        sequences = Sequences(data)
        kinds = ["begin", "step", "step", "step", "end"]
        for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=25)):
            getattr(sequences, kind)()

    serve()


def before(num_tokens: int) -> TokensBefore:
    return TokensBefore(TokenCounts(1), [1] * num_tokens)


def test_a_sequence_is_sent_once_and_then_only_what_drafts_brought() -> None:
    counts, sequence = DeviceCounts(VOCAB, CPU), before(5)
    _, places, amounts = counts.seat([sequence])
    assert (places.tolist(), amounts.tolist()) == ([1] * 5, [1, 2, 2, 2, 2])
    counts.add_sampled([sequence], torch.tensor([0]), torch.tensor([3]))
    sequence.known.append(3)
    assert not len(counts.seat([sequence])[1])
    sequence.known.extend([2, 4])
    assert counts.seat([sequence])[1].tolist() == [2, 4]


def test_a_row_without_a_token_changes_no_count() -> None:
    counts, sequence = DeviceCounts(VOCAB, CPU), before(1)
    counts.seat([sequence])
    counts.add_sampled([sequence], torch.tensor([0]), torch.tensor([-1]))
    assert counts.words is not None
    assert not counts.words.any()


def test_memory_is_taken_for_as_many_seats_as_a_step_needs_while_sequences_live() -> None:
    counts, sequences = DeviceCounts(VOCAB, CPU), [before(2) for _ in range(5)]
    assert counts.words is None
    sizes = []
    for num in (1, 2, 5, 1):
        counts.seat(sequences[:num])
        assert counts.words is not None
        sizes.append(len(counts.words))
    assert sizes == [1, 2, 8, 8]
    counts.release_if_unused()
    assert counts.words is not None
    del sequences
    gc.collect()
    counts.release_if_unused()
    assert counts.words is None


def test_sequences_that_take_turns_share_seats() -> None:
    counts, sequences = DeviceCounts(VOCAB, CPU), [before(2 + i) for i in range(9)]
    for turn in range(6):
        both = [sequences[turn], sequences[turn + 3]]
        _, places, amounts = counts.seat(both)
        counts.add(torch.from_numpy(places), torch.from_numpy(amounts))
    assert counts.words is not None
    assert len(counts.words) == 2
