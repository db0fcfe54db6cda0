"""Prompt lookup: what it guesses, against a search of the whole sequence for every draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.drafter import INDEXED_A_STEP, PromptLookup
from gptserve.engine.scheduling.ngram import MAX_NGRAM, MIN_NGRAM
from gptserve.engine.scheduling.sequence import SequenceState

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def sequence(token_ids: Sequence[int]) -> SequenceState:
    return SequenceState(Request("r", tuple(token_ids), SamplingParams(), seed=0), 0, list(token_ids))


def search(token_ids: Sequence[int], max_ngram: int, max_tokens: int) -> tuple[int, ...]:
    """Guess by the definition: the longest n-gram, its latest earlier place, and token by token what follows there."""
    for n in range(min(max_ngram, len(token_ids) - 1), MIN_NGRAM - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                followed = list(token_ids)
                for place in range(end, end + max_tokens):
                    followed.append(followed[place])
                return tuple(followed[len(token_ids) :])
    return ()


@pytest.mark.parametrize(
    ("token_ids", "max_ngram", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 2, (3, 4, 5)),
        ([1, 2, 3, 1, 2, 4, 9, 8, 1, 2], 2, (4, 9, 8)),  # the latest place
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 3, (3, 8, 1)),  # the longer n-gram before the later place
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 2, (4, 7, 1)),
        ([5, 1, 2, 1, 2], 2, (1, 2, 1)),  # a loop
        ([5, 6, 6, 6], 3, (6, 6, 6)),
        ([1, 2, 3, 4, 1], 4, ()),  # one token is too few
        ([1], 2, ()),
    ],
)
def test_a_guess_is_what_followed_the_longest_ngram_the_last_time(
    token_ids: list[int], max_ngram: int, expected: tuple[int, ...]
) -> None:
    assert PromptLookup(max_ngram).draft(sequence(token_ids), 3) == expected
    assert search(token_ids, max_ngram, 3) == expected


@given(TOKENS, st.lists(TOKENS, max_size=5), st.integers(MIN_NGRAM, MAX_NGRAM), st.integers(1, 8))
def test_the_index_finds_what_a_search_finds_however_a_sequence_grows(
    prompt: list[int], additions: list[list[int]], max_ngram: int, max_tokens: int
) -> None:
    drafter, growing = PromptLookup(max_ngram), sequence(prompt)
    for addition in [[], *additions]:
        growing.token_ids += addition
        assert drafter.draft(growing, max_tokens) == search(growing.token_ids, max_ngram, max_tokens)


def test_sequences_are_looked_up_each_in_itself_until_they_are_forgotten() -> None:
    drafter, first, second = PromptLookup(2), sequence([1, 2, 3, 1, 2]), sequence([1, 2, 4, 1, 2])
    assert (drafter.draft(first, 1), drafter.draft(second, 1)) == ((3,), (4,))
    drafter.forget(first)
    del first.token_ids[:3]
    assert drafter.draft(first, 1) == (), "an index left behind would still find 3"
    drafter.forget(sequence([9]))


class CountedList(list[int]):
    """A list that counts how often it is read."""

    num_reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("num_tokens", [50, INDEXED_A_STEP])
def test_a_draft_reads_only_what_is_new_whatever_the_context(num_tokens: int) -> None:
    drafter, growing = PromptLookup(3), sequence(range(num_tokens))
    drafter.draft(growing, 4)
    drafter.begin_step(1)
    growing.token_ids = CountedList([*growing.token_ids, num_tokens])
    drafter.draft(growing, 4)
    assert growing.token_ids.num_reads == 4, "a bigram and a trigram to enter, and as many to look for"


def test_a_long_prompt_is_entered_part_by_part() -> None:
    drafter, long = PromptLookup(3), sequence([*range(50), *range(2 * INDEXED_A_STEP), *range(50)])
    for _ in range(2):
        assert drafter.draft(long, 4) == ()
        drafter.begin_step(1)
    assert drafter.draft(long, 4) == (50, 51, 52, 53)


def test_a_step_enters_so_many_tokens_of_all_sequences_together() -> None:
    drafter, prompts = PromptLookup(3), [sequence([*range(50), *range(600), *range(50)]) for _ in range(4)]
    ready = []
    for _ in range(4):
        drafter.begin_step(1)
        ready.append([drafter.draft(prompt, 4) == (50, 51, 52, 53) for prompt in prompts])
    assert ready == [[True, False, False, False], [True, True, False, False], [True, True, True, True], [True] * 4]
