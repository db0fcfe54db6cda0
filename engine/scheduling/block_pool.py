"""Who holds which block of the KV cache, and which blocks hold a prefix worth finding again.

Knows block numbers and token ids; no tensors, requests or order of service. Only Scheduler calls it.
Every operation costs O(1) for each block it is asked about, whatever the size of the pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Prefix = int | str
"""The exact tokens up to some block's end: a number given out once, or, before the first block, the cache_salt."""


class BlockPool:
    """Reference counts, the prefix cache and its eviction.

    A block is in exactly one state: held (it has references), cached (it has none, but its content can be found) or
    blank (neither). New blocks are taken from the blank ones, then from the cached ones, least recently used first.

    The prefix cache maps (Prefix before a block, its token ids) to the block. The content of each findable block has a
    Prefix of its own, which stands in the keys of the blocks that follow: a chain whose every link is confirmed by
    comparing token ids, back to the salt. By induction a match holds exactly the tokens asked for, and no collision of
    hashes, by accident or design, can make two prefixes share a block. A Prefix is never given out twice, so a
    block whose predecessor was evicted is at worst not found again, never found wrongly.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_references = [0] * num_blocks
        self._blank = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._findable: dict[tuple[Prefix, tuple[int, ...]], int] = {}
        self._keys: list[tuple[Prefix, tuple[int, ...]] | None] = [None] * num_blocks  # None: not findable
        self._prefixes: list[Prefix] = [""] * num_blocks  # meaningful from `register` until the block is reused
        self._num_prefixes = 0

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` could give out now: the blank and the cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        """How many blocks are held."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """How many free blocks hold content that `match` could find."""
        return len(self._cached)

    def match(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        """Return the blocks that hold the longest known prefix of token_ids; takes no references.

        Never covers the last token: it has to be computed for its logits, and a shared block is never written to.
        """
        block_ids: list[int] = []
        prefix: Prefix = cache_salt
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            block_id = self._findable.get((prefix, tuple(token_ids[start : start + self.block_size])))
            if block_id is None:
                break
            block_ids.append(block_id)
            prefix = self._prefixes[block_id]
        return block_ids

    def allocate(self, num_new: int, matched: Sequence[int] = ()) -> list[int] | None:
        """Return `matched`, then num_new blocks of undefined content, having taken one reference to each.

        None, and nothing is changed, when too few blocks are free.
        """
        num_revived = sum(self._num_references[block_id] == 0 for block_id in matched)
        if num_new + num_revived > self.num_free:
            return None
        for block_id in matched:
            if self._num_references[block_id] == 0:
                del self._cached[block_id]
            self._num_references[block_id] += 1
        return [*matched, *(self._take_free() for _ in range(num_new))]

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, in the sequence's order.

        The tail is freed first, so that it is evicted first: a block is of use only with those before it.
        """
        for block_id in reversed(block_ids):
            assert self._num_references[block_id] > 0, f"block {block_id} was freed more often than taken"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                if self._keys[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_ids: Sequence[int], index: int, token_ids: Sequence[int], cache_salt: str) -> bool:
        """Make block_ids[index] findable: the tokens of the sequence that holds block_ids fill it.

        The blocks before it have been matched or registered. False if nothing was changed for `match`: caching is off,
        or another block with this content is findable already.
        """
        if not self.enable_prefix_caching:
            return False
        block_id, start = block_ids[index], index * self.block_size
        previous = self._prefixes[block_ids[index - 1]] if index else cache_salt
        key = (previous, tuple(token_ids[start : start + self.block_size]))
        twin = self._findable.get(key)
        if twin is not None:
            self._prefixes[block_id] = self._prefixes[twin]
            return False
        self._findable[key] = block_id
        self._keys[block_id] = key
        self._prefixes[block_id] = self._num_prefixes
        self._num_prefixes += 1
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make the blocks unfindable, because their content cannot be trusted; references stay as they are."""
        for block_id in block_ids:
            if self._keys[block_id] is None:
                continue
            self._drop_key(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._blank.append(block_id)

    def check_invariants(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert everything the class promises, given the blocks of every sequence that holds any. O(blocks)."""
        references = Counter(block_id for block_ids in owners for block_id in block_ids)
        assert self._num_references == [references[block_id] for block_id in range(self.num_blocks)]
        states = [*references, *self._blank, *self._cached]
        assert sorted(states) == list(range(self.num_blocks)), f"not one state for each block: {states}"
        assert all(self._keys[block_id] is None for block_id in self._blank)
        assert all(self._keys[block_id] is not None for block_id in self._cached)
        keys = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        assert keys == self._findable
        assert len({self._prefixes[block_id] for block_id in keys.values()}) == len(keys), "a Prefix was given twice"
        for (previous, token_ids), block_id in keys.items():
            assert len(token_ids) == self.block_size
            prefix = self._prefixes[block_id]
            assert isinstance(prefix, int)
            assert isinstance(previous, str) or previous < prefix < self._num_prefixes

    def _take_free(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._drop_key(block_id)
        self._num_references[block_id] = 1
        return block_id

    def _drop_key(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        del self._findable[key]
        self._keys[block_id] = None
