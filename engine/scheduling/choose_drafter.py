"""Which drafter a configuration and a model have. Engine calls it."""

from __future__ import annotations

import logging

from gptserve.engine.scheduling.draft_gain import MeasuredDrafter
from gptserve.engine.scheduling.drafter import Drafter, PromptLookup
from gptserve.engine.scheduling.grammar_drafter import GrammarDrafter

logger = logging.getLogger(__name__)


def choose_drafter(speculative_ngram: int, *, has_states: bool) -> Drafter:
    """Return what drafts tokens: nothing with states, as none can go back to where a draft was right."""
    if not has_states:
        lookup = MeasuredDrafter(PromptLookup(speculative_ngram)) if speculative_ngram else Drafter()
        return GrammarDrafter(lookup)
    if speculative_ngram:
        logger.warning("speculative_ngram %d is not used: this model keeps states", speculative_ngram)
    return Drafter()
