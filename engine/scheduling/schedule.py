"""What a step is to compute and what it gave, in sequences and tokens.

Torch-free and frozen. Scheduler makes all of it; batch.py turns a ScheduledBatch into tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptserve.engine.request import FinishReason
from gptserve.engine.scheduling.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The next num_tokens tokens of a sequence to compute; all of them have blocks.

    They are its uncomputed ones, or the first of those; the last len(draft) of them are `draft`, guesses at what
    follows all the known tokens.
    """

    sequence: SequenceState
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def needs_sampling(self) -> bool:
        """Whether the newest known token is among these, so that its logits give the next; valid until `update`."""
        return self.num_tokens == self.sequence.num_uncomputed + len(self.draft)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step computes, each sequence at most once.

    A sequence may read blocks that another one fills in the same step: each layer stores the keys and values of the
    whole step before any of them is attended to.
    """

    items: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum(item.num_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step gave to a sequence that was to sample: tokens, or the end by ERROR and none.

    finish_reason is set if nothing more comes; stop_token_id is the last token, if that stopped the sequence.
    """

    sequence: SequenceState
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
