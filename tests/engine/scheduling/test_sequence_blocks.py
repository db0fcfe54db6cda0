"""The blocks of one sequence: allocated with its tokens, shared when full, freed behind them."""

from __future__ import annotations

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
