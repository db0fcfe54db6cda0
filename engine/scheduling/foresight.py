"""What Scheduler does to the sequences of a step that runs, so that the next one can be planned (Scheduler.foresee).

A sequence that goes on gets a foreseen token: a negative number, ~row, for what a row of the running step will give. It
counts as known, but for its id. The device has the id by the time it computes the next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptserve.engine.scheduling.drafter import Drafter
from gptserve.engine.scheduling.sequence import ScheduledBatch, ScheduledSequence, SequenceState
from gptserve.engine.scheduling.sequence_blocks import SequenceBlocks


def is_always_foreseeable(sequence: SequenceState, drafter: Drafter) -> bool:
    """Whether `must_be_known` can never hold: neither the request nor the drafter reads the newest token."""
    params, is_drafted = sequence.sampling.params, drafter.may_draft(sequence)
    is_read = params.has_penalties or params.bad_words or params.grammar is not None
    return not (is_read or is_drafted or params.prompt_logprobs is not None or sequence.pooled is not None)


def must_be_known(item: ScheduledSequence, drafter: Drafter, *, host_counts: bool) -> bool:
    """Whether the host needs what a step gives a sequence before the next step begins.

    Drafters, grammars and bad_words read the tokens, and so do penalties if the host counts for them. prompt_logprobs
    and vectors are computed when the step is awaited. An item with a draft samples several rows, and nobody knows which
    of them holds: `foresee` counts one an item.
    """
    sequence, params = item.sequence, item.sequence.sampling.params
    if item.draft:
        return True
    if not sequence.is_running:  # aborted
        return False
    if sequence.pooled is not None or (params.prompt_logprobs is not None and sequence.num_generated == 0):
        return True
    if not item.needs_sampling:
        return False
    if params.bad_words or params.grammar is not None or drafter.may_draft(sequence):
        return True
    return host_counts and params.has_penalties


def num_missing_blocks(running: Iterable[SequenceState], blocks: SequenceBlocks) -> int:
    """Return how many blocks these sequences lack if each gets one more token."""
    return sum(
        blocks.num_needed(sequence, 1) - len(sequence.block_ids)
        for sequence in running
        if len(sequence.token_ids) >= len(sequence.block_ids) * blocks.block_size
    )


def foresee(batch: ScheduledBatch) -> None:
    """Count a running step without drafts as computed; give each sequence that goes on a foreseen token."""
    count_computed(batch)
    sampling = [item.sequence for item in batch.items if item.needs_sampling]
    for row, sequence in enumerate(sampling):
        if sequence.block_ids and len(sequence.token_ids) + 1 < sequence.max_len:  # faster than is_running
            sequence.token_ids.append(~row)


def count_computed(batch: ScheduledBatch) -> None:
    """Count the tokens of a step as computed; of drafts `update` knows which."""
    for item in batch.items:
        item.sequence.num_computed += item.num_tokens - len(item.draft)


def drop_foreseen(sequence: SequenceState) -> None:
    """Take back the foreseen token, if there is one."""
    if sequence.is_foreseen:
        sequence.token_ids.pop()
