"""Which blocks of the KV cache are in use, and which hold a prefix that can be found again.

It knows block numbers and token ids; no tensors, requests or order of service. Scheduler and SequenceBlocks call it.
Every operation costs O(1) for each block in its arguments, for any size of the pool.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PrefixId = int | str
"""Identifies a token prefix that ends with a block; the cache_salt stands for the empty prefix."""


class BlockPool:
    """Reference counts, the prefix cache and its eviction.

    A block is in exactly one state: held (it has references), cached (it has none, but its content can be found) or
    blank (neither). New blocks come from the blank ones, then from the cached ones, least recently used first.

    The prefix cache maps (PrefixId before a block, its token ids) to the block. A findable block has its own PrefixId,
    which is part of the keys of the blocks after it. So blocks form chains, back to the salt, and each link compares
    token ids. By induction a match holds exactly the tokens asked for. No collision of hashes, by accident or design,
    can make two prefixes share a block. A PrefixId is used only once. So a block whose predecessor was evicted may not
    be found again, but is never found for other tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_references = array("i", [0]) * num_blocks
        """Of each block; for others to read, as is `findable`."""
        self.findable = bytearray(num_blocks)
        """1 for each block whose content `match` could find."""
        self._blank = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._findable: dict[tuple[PrefixId, tuple[int, ...]], int] = {}
        self._keys: list[tuple[PrefixId, tuple[int, ...]] | None] = [None] * num_blocks  # None: not findable
        self._prefixes: list[PrefixId] = [""] * num_blocks  # meaningful from `register` until the block is reused
        self._num_prefixes = 0
        self.num_offers = 0
        """How often a block has come to be both held and findable. The number of held blocks that `match` finds for
        given tokens never grows by more than this."""

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` could return now: the blank and the cached ones."""
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
        """Return the blocks that hold the longest cached prefix of token_ids; takes no references.

        The prefix never includes the last token: its logits must be computed, and a shared block is never written to.
        """
        block_ids: list[int] = []
        prefix: PrefixId = cache_salt
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            block_id = self._findable.get((prefix, tuple(token_ids[start : start + self.block_size])))
            if block_id is None:
                break
            block_ids.append(block_id)
            prefix = self._prefixes[block_id]
        return block_ids

    def prefix_of(self, block_id: int) -> PrefixId:
        """Return what identifies the tokens up to the end of a block that `match` has returned or `register` was given.

        No other tokens ever have it; the same ones may get another once the block is no longer findable.
        """
        return self._prefixes[block_id]

    def allocate(self, num_new: int, matched: Sequence[int] = ()) -> list[int] | None:
        """Take one reference to each block of `matched` and to num_new others; return them in this order.

        The content of the others is undefined. If too few blocks are free, return None and change nothing.
        """
        num_revived = sum(self.num_references[block_id] == 0 for block_id in matched)
        if num_new + num_revived > self.num_free:
            return None
        for block_id in matched:
            if self.num_references[block_id] == 0:
                del self._cached[block_id]
                self.num_offers += 1
            self.num_references[block_id] += 1
        return [*matched, *(self._take_free() for _ in range(num_new))]

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each of these blocks, which are in the order of their sequence.

        The tail is freed first, so that it is evicted first: a block is useless without those before it.
        """
        for block_id in reversed(block_ids):
            assert self.num_references[block_id] > 0, f"block {block_id} was freed more often than taken"
            self.num_references[block_id] -= 1
            if self.num_references[block_id] == 0:
                if self._keys[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_ids: Sequence[int], index: int, token_ids: Sequence[int], cache_salt: str) -> bool:
        """Make block_ids[index] findable; block_ids and token_ids are those of one sequence.

        The blocks before it must be matched or registered. False if `match` finds nothing new: caching is off, or
        another block with this content is already findable.
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
        self.findable[block_id] = 1
        self._prefixes[block_id] = self._num_prefixes
        self._num_prefixes += 1
        self.num_offers += 1
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make the blocks unfindable, because their content cannot be trusted. References are unchanged."""
        for block_id in block_ids:
            if self._keys[block_id] is None:
                continue
            self._drop_key(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._blank.append(block_id)

    def _take_free(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._drop_key(block_id)
        self.num_references[block_id] = 1
        return block_id

    def _drop_key(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        del self._findable[key]
        self._keys[block_id] = None
        self.findable[block_id] = 0
