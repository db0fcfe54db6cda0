"""The blocks of one sequence: allocated with its tokens, shared when full, freed behind them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from gptserve.engine.request import Request, SamplingParams
from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.foresight import num_missing_blocks
from gptserve.engine.scheduling.sequence import SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, 4, enable_prefix_caching=True)


@pytest.fixture
def blocks(pool: BlockPool) -> SequenceBlocks:
    return SequenceBlocks(pool)


def sequence(num_tokens: int) -> SequenceState:
    token_ids = list(range(num_tokens))
    return SequenceState(Request("r", tuple(token_ids), SamplingParams(), seed=0), 0, token_ids)


def test_a_sequence_gets_all_blocks_it_needs_or_none(blocks: SequenceBlocks, pool: BlockPool) -> None:
    first, second = sequence(9), sequence(5)
    assert blocks.allocate(first, use_cache=True)
    assert not blocks.allocate(second, use_cache=True)
    assert (len(first.block_ids), len(second.block_ids), pool.num_free) == (3, 0, 1)
    blocks.free(first)
    assert (len(first.block_ids), pool.num_free) == (0, 4)


@pytest.mark.parametrize(("num_tokens", "num_missing"), [(3, 0), (4, 1), (5, 0), (8, 1)])
def test_a_sequence_lacks_a_block_once_its_last_one_is_full(
    blocks: SequenceBlocks, pool: BlockPool, num_tokens: int, num_missing: int
) -> None:
    growing = sequence(num_tokens)
    blocks.allocate(growing, use_cache=False)
    num_blocks = len(growing.block_ids)
    assert num_missing_blocks([growing, growing], blocks) == 2 * num_missing
    growing.token_ids.append(0)
    assert blocks.grow(growing)
    assert len(growing.block_ids) == num_blocks + num_missing
    assert num_missing_blocks([growing], blocks) == (len(growing.token_ids) == 4)


def test_registered_blocks_are_shared_unless_their_step_fails(blocks: SequenceBlocks) -> None:
    first = sequence(9)
    blocks.allocate(first, use_cache=True)
    blocks.register(first, 0, 4)
    unfilled = blocks.begin_step()
    blocks.register(first, 4, 8)
    blocks.forget_unfilled(unfilled)
    twin = sequence(9)
    blocks.free(first)
    assert blocks.allocate(twin, use_cache=True)
    assert (twin.block_ids[0], twin.num_computed) == (0, 4), "only the first block was filled by an earlier step"
    blocks.free(twin)
    assert blocks.allocate(twin, use_cache=False)
    assert twin.num_computed == 0


def test_a_draft_gets_free_blocks_and_its_rejected_tokens_give_them_back(
    blocks: SequenceBlocks, pool: BlockPool
) -> None:
    drafting = sequence(6)
    blocks.allocate(drafting, use_cache=False)
    assert blocks.reserve(drafting, 2) == 2
    assert blocks.reserve(drafting, 20) == 10, "all that four blocks hold"
    assert pool.num_free == 0
    drafting.token_ids += [1, 2, 3]
    blocks.trim(drafting)
    assert (len(drafting.block_ids), pool.num_free) == (3, 1)


def test_a_blocked_sequence_is_matched_once_and_again_when_that_may_change_something(
    blocks: SequenceBlocks, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched, match = list[int](), pool.match
    monkeypatch.setattr(pool, "match", lambda token_ids, salt: matched.append(len(token_ids)) or match(token_ids, salt))
    running, waiting = numbered(0, range(9)), numbered(1, range(100, 109))
    assert blocks.allocate(running, use_cache=True)
    for _ in range(50):
        assert not blocks.allocate(waiting, use_cache=True)
    assert matched == [9, 9]
    blocks.free(running)
    assert blocks.allocate(waiting, use_cache=True)
    assert matched == [9, 9, 9]


def numbered(arrival: int, token_ids: Iterable[int]) -> SequenceState:
    known = list(token_ids)
    return SequenceState(Request("r", tuple(known), SamplingParams(), seed=0), arrival, known)


def disagreements(seed: int, *, notes_offers: bool = True) -> int:
    """Return how often `allocate` of random sequences decided otherwise than the pool's blocks alone say."""
    rng, num_wrong = random.Random(seed), 0
    pool = BlockPool(rng.randint(4, 16), rng.choice([1, 2, 4]), enable_prefix_caching=True)
    blocks = SequenceBlocks(pool)
    live, waiting = list[SequenceState](), list[SequenceState]()
    for arrival in range(300):
        if len(waiting) < 2:
            prefix, length = rng.randint(0, 1), rng.randint(1, 24)
            waiting.append(numbered(arrival, [prefix] * length if rng.random() < 0.8 else range(length)))
        head = waiting[0]
        matched = pool.match(head.token_ids, "")
        num_held = sum(pool.num_references[block_id] > 0 for block_id in matched)
        expected = blocks.num_needed(head) - num_held <= pool.num_free
        found = blocks.allocate(head, use_cache=True)
        num_wrong += found != expected
        if found:
            live.append(waiting.pop(0))
        elif expected or blocks.num_needed(head) > 12:
            waiting.pop(0)
        for sequence in rng.sample(live, rng.randint(0, len(live))):
            if sequence.num_computed < len(sequence.token_ids) - 1 and rng.random() < 0.7:
                end = rng.randint(sequence.num_computed + 1, len(sequence.token_ids))
                blocks.register(sequence, sequence.num_computed, end)
                sequence.num_computed = end
            elif rng.random() < 0.3:
                blocks.free(sequence)
                live.remove(sequence)
        if not notes_offers:
            pool.num_offers = 0
    return num_wrong


def test_a_remembered_refusal_decides_as_the_blocks_do() -> None:
    assert sum(map(disagreements, range(60))) == 0


def test_a_refusal_that_forgets_what_became_shared_would_be_seen() -> None:
    assert sum(disagreements(seed, notes_offers=False) for seed in range(60)) > 0
