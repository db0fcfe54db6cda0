"""What the grammars of a step allow, asked of all its matchers in a thread beside the model. Torch-free.

ModelRunner starts the thread's work, and what samples takes the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gptserve.engine.grammar.matcher import Mask, Matcher
from gptserve.engine.scheduling.sequence import ScheduledBatch, SequenceState

Masks = dict[SequenceState, list[Mask]]
"""Of each sequence with a grammar: what may come after the known tokens, then what after each token of the draft."""


class MaskThread:
    """Computes the masks of a step in a thread, beside the model: llguidance lets go of the interpreter's lock."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gptserve-masks")

    def begin(self, batch: ScheduledBatch) -> Future[Masks] | None:
        """Begin with the sequences that are sampled and have a matcher; None if there are none."""
        asked = [
            (
                item.sequence,
                item.sequence.matcher,
                item.sequence.token_ids[item.sequence.num_prompt_tokens :],
                item.draft,
            )
            for item in batch.items
            if item.needs_sampling and item.sequence.matcher is not None
        ]
        return self._thread.submit(_masks_of, asked) if asked else None


def _masks_of(asked: Sequence[tuple[SequenceState, Matcher, list[int], tuple[int, ...]]]) -> Masks:
    return {
        sequence: matcher.masks(known, draft, sequence.request.params.num_before_end)
        for sequence, matcher, known, draft in asked
    }
