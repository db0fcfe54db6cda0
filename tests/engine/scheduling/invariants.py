"""Checks the invariants that the docstrings of BlockPool, SequenceState and Scheduler state, on their inner state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

from gptserve.engine.scheduling.block_pool import BlockPool
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.engine.scheduling.sequence import ScheduledSequence


def check_pool(pool: BlockPool, owners: Iterable[Sequence[int]]) -> None:
    """Assert all invariants of a pool; `owners` are the blocks of every sequence that holds any. O(blocks)."""
    references = Counter(block_id for block_ids in owners for block_id in block_ids)
    assert list(pool.num_references) == [references[block_id] for block_id in range(pool.num_blocks)]
    states = [*references, *pool._blank, *pool._cached]
    assert sorted(states) == list(range(pool.num_blocks)), f"not one state for each block: {states}"
    assert all(pool._keys[block_id] is None for block_id in pool._blank)
    assert all(pool._keys[block_id] is not None for block_id in pool._cached)
    keys = {key: block_id for block_id, key in enumerate(pool._keys) if key is not None}
    assert keys == pool._findable
    assert list(pool.findable) == [key is not None for key in pool._keys]
    assert len({pool._prefixes[block_id] for block_id in keys.values()}) == len(keys), "a PrefixId was given twice"
    for (previous, token_ids), block_id in keys.items():
        assert len(token_ids) == pool.block_size
        prefix = pool._prefixes[block_id]
        assert isinstance(prefix, int)
        assert isinstance(previous, str) or previous < prefix < pool._num_prefixes


def check_scheduler(scheduler: Scheduler, scheduled: Iterable[ScheduledSequence] = ()) -> None:
    """Assert all invariants of a scheduler, its sequences and its pool; `scheduled` is of the step under way."""
    drafts = {item.sequence: item.draft for item in scheduled if item.draft}
    pool, running, waiting = scheduler._pool, scheduler._running, scheduler._waiting
    check_pool(pool, [sequence.block_ids for sequence in running])
    everyone = [*running, *waiting]
    assert len(everyone) == len(scheduler._live)
    assert all(scheduler._live[sequence.request.request_id] is sequence for sequence in everyone)
    assert len(running) <= scheduler._max_num_seqs
    for queue in (running, waiting):
        assert queue == sorted(queue, key=attrgetter("order"))
    for sequence in everyone:
        assert sequence.finish_reason is None
        all_computed = scheduler._foreseen is not None and sequence.num_computed == len(sequence.token_ids)
        assert 0 <= sequence.num_computed < len(sequence.token_ids) + all_computed <= scheduler._max_model_len
        assert all(token_id >= 0 for token_id in sequence.token_ids[:-1])
        assert not sequence.is_foreseen or (scheduler._foreseen is not None and sequence.is_running)
        assert tuple(sequence.token_ids[: sequence.num_prompt_tokens]) == sequence.request.prompt_token_ids
        most = sequence.num_prompt_tokens + sequence.request.params.max_tokens
        assert sequence.max_len == min(most, scheduler._max_model_len)
    for sequence in waiting:
        assert sequence.num_computed == 0
        assert not sequence.is_running
    for sequence in running:
        assert sequence.is_running
        assert sequence.num_computed <= len(sequence.block_ids) * pool.block_size
        draft = drafts.get(sequence, ())
        num_needed = scheduler._blocks.num_needed(sequence, len(draft))
        assert len(sequence.block_ids) == num_needed if draft else len(sequence.block_ids) <= num_needed
    for sequence, draft in drafts.items():
        num_left = sequence.max_len - len(sequence.token_ids)
        assert 0 < len(draft) < num_left, "the token after the draft must still be wanted"
    assert scheduler._suspects == {sequence for sequence in everyone if sequence.blame.is_suspect}
