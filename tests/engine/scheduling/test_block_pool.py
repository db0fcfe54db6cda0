"""Who holds which block, what is found again, and what is evicted first."""

from __future__ import annotations

import pytest

from gptserve.engine.scheduling.block_pool import BlockPool
from tests.engine.scheduling.invariants import check_pool

BLOCK_SIZE = 2


def make_pool(num_blocks: int, *, enable_prefix_caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching)


def hold(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Allocate blocks for token_ids, none of them matched, and register those that are full."""
    block_ids = pool.allocate(-(-len(token_ids) // BLOCK_SIZE))
    assert block_ids is not None
    for index in range(len(token_ids) // BLOCK_SIZE):
        pool.register(block_ids, index, token_ids, salt)
    return block_ids


def find(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Match all of token_ids, by asking for one token more."""
    return pool.match([*token_ids, 9], salt)


def test_allocates_all_or_nothing() -> None:
    pool = make_pool(3)
    first = pool.allocate(2)
    assert first is not None
    assert len(set(first)) == 2
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 2)
    check_pool(pool, [first])


def test_blocks_without_content_are_used_before_cached_ones() -> None:
    pool = make_pool(4)
    cached = hold(pool, [1, 2])
    blank = hold(pool, [3])
    pool.free(cached)
    pool.free(blank)
    assert pool.num_cached == 1
    assert pool.allocate(3) is not None
    assert find(pool, [1, 2]) == cached
    assert pool.allocate(1) == cached
    assert find(pool, [1, 2]) == []


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    pool = make_pool(2)
    block_ids = hold(pool, [1, 2, 3, 4])
    pool.free(block_ids)
    assert pool.num_free == 2
    assert find(pool, [1, 2, 3, 4]) == block_ids
    assert pool.allocate(2) is not None
    assert find(pool, [1, 2, 3, 4]) == []


def test_a_chain_loses_its_tail_before_its_head() -> None:
    pool = make_pool(3)
    block_ids = hold(pool, [1, 2, 3, 4, 5, 6])
    pool.free(block_ids)
    for num_left in (2, 1, 0):
        assert pool.allocate(1) == [block_ids[num_left]]
        assert find(pool, [1, 2, 3, 4, 5, 6]) == block_ids[:num_left]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = make_pool(2)
    old, new = hold(pool, [1, 1]), hold(pool, [2, 2])
    pool.free(old)
    pool.free(new)
    revived = pool.allocate(0, find(pool, [1, 1]))  # a hit makes it the most recently used
    assert revived == old
    pool.free(revived)
    assert pool.allocate(1) == new


def test_a_shared_block_is_held_until_its_last_holder_frees_it() -> None:
    pool = make_pool(3)
    first = hold(pool, [1, 2, 3])
    second = pool.allocate(1, pool.match([1, 2, 3], ""))
    assert second is not None
    assert second[0] == first[0]
    check_pool(pool, [first, second])
    pool.free(first)
    check_pool(pool, [second])
    assert pool.num_used == 2
    pool.free(second)
    check_pool(pool, [])
    assert pool.num_used == 0


def test_cached_blocks_that_are_matched_are_not_counted_as_free_for_the_rest() -> None:
    pool = make_pool(2)
    pool.free(hold(pool, [1, 2]))
    matched = find(pool, [1, 2])
    assert pool.allocate(2, matched) is None
    assert find(pool, [1, 2]) == matched
    check_pool(pool, [])
    assert pool.allocate(1, matched) is not None


def test_a_match_never_covers_the_last_token() -> None:
    pool = make_pool(2)
    block_ids = hold(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4], "") == block_ids[:1]
    assert pool.match([1, 2], "") == []
    assert pool.match([1], "") == []


def test_the_same_tokens_after_another_prefix_do_not_match() -> None:
    pool = make_pool(4)
    first = hold(pool, [1, 1, 5, 5])
    second = hold(pool, [2, 2, 5, 5])
    assert find(pool, [1, 1, 5, 5]) == first
    assert find(pool, [2, 2, 5, 5]) == second
    assert find(pool, [5, 5]) == []


def test_a_salt_separates_caches() -> None:
    pool = make_pool(2)
    mine = hold(pool, [1, 2], "mine")
    assert find(pool, [1, 2], "mine") == mine
    assert find(pool, [1, 2], "yours") == []
    assert find(pool, [1, 2]) == []


def test_equal_hashes_do_not_make_a_match() -> None:
    assert hash((-1, 5)) == hash((-2, 5)), "CPython gives -1 and -2 the same hash"
    pool = make_pool(1)
    block_ids = hold(pool, [-1, 5])
    assert find(pool, [-2, 5]) == []
    assert find(pool, [-1, 5]) == block_ids


def test_of_two_blocks_with_one_content_the_first_stays_findable_and_leads_on_to_the_second_chain() -> None:
    pool = make_pool(4)
    first = hold(pool, [1, 1])
    twin = hold(pool, [1, 1, 2, 2])
    assert find(pool, [1, 1, 2, 2]) == [first[0], twin[1]]
    check_pool(pool, [first, twin])
    pool.free(twin)
    assert pool.num_cached == 1, "the twin itself has nothing to offer"
    check_pool(pool, [first])


def test_a_block_behind_an_evicted_one_is_not_found_behind_what_replaces_it() -> None:
    pool = make_pool(2)
    head, tail = hold(pool, [1, 1, 2, 2])
    pool.free([head])
    assert pool.allocate(1) == [head]
    assert find(pool, [1, 1, 2, 2]) == []
    pool.register([head], 0, [3, 3], "")
    assert find(pool, [3, 3, 2, 2]) == [head]
    check_pool(pool, [[head], [tail]])


def test_a_forgotten_block_is_not_found_and_is_blank_when_freed() -> None:
    pool = make_pool(3)
    held, freed = hold(pool, [1, 1]), hold(pool, [2, 2])
    pool.free(freed)
    pool.forget(held + freed)
    pool.forget(held)
    assert find(pool, [1, 1]) == []
    assert find(pool, [2, 2]) == []
    assert pool.num_cached == 0
    check_pool(pool, [held])
    pool.free(held)
    assert (pool.num_cached, pool.num_free) == (0, 3)
    check_pool(pool, [])


def test_nothing_is_found_with_caching_off() -> None:
    pool = make_pool(2, enable_prefix_caching=False)
    block_ids = hold(pool, [1, 2, 3, 4])
    assert find(pool, [1, 2, 3, 4]) == []
    pool.free(block_ids)
    assert (pool.num_cached, pool.num_free) == (0, 2)
    check_pool(pool, [])


def test_freeing_a_block_twice_is_refused() -> None:
    pool = make_pool(1)
    block_ids = hold(pool, [1])
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.free(block_ids)


@pytest.mark.parametrize("owners", [[], [[0], [0]], [[1]], [[0, 1]]])
def test_the_invariants_notice_owners_that_do_not_match(owners: list[list[int]]) -> None:
    pool = make_pool(2)
    assert hold(pool, [1, 2]) == [0]
    check_pool(pool, [[0]])
    with pytest.raises(AssertionError):
        check_pool(pool, owners)
