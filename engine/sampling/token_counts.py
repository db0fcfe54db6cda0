"""How often each token stands in a sequence. Penalties ask for it at each new token.

Counting a context anew takes longer than drawing from the logits, so a sequence keeps its counts: here or, on a GPU, in
gpu/token_counts.py. Torch-free; adjustments.py calls it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class TokenCounts:
    """The distinct tokens of prompt and completion, and how often each was generated.

    token_ids[i] was generated counts[i] times: 0 for a token of the prompt alone. Both are 64-bit integers.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.token_ids = array("q")
        self.counts = array("q")
        self.num_tokens = 0
        self.num_prompt_tokens = num_prompt_tokens
        self._places: dict[int, int] = {}

    def add(self, token_ids: Iterable[int]) -> None:
        """Count the tokens that follow those counted so far."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += self.num_tokens >= self.num_prompt_tokens
            self.num_tokens += 1

    def followed_by(self, token_ids: Iterable[int]) -> TokenCounts:
        """Return the counts after these tokens too, and leave this object as it is."""
        after = TokenCounts(self.num_prompt_tokens)
        after.token_ids, after.counts, after._places = self.token_ids[:], self.counts[:], self._places.copy()
        after.num_tokens = self.num_tokens
        after.add(token_ids)
        return after


class TokensBefore(NamedTuple):
    """The tokens before a position: those that its sequence knows, and a draft. They are counted when asked for.

    `kept` stands for the sequence, and keeps its counts from one position to the next.
    """

    kept: TokenCounts
    known: list[int]
    draft: tuple[int, ...] = ()

    def counts(self) -> TokenCounts:
        """Return the counts of all these tokens."""
        kept, known, draft = self
        assert not known or known[-1] >= 0, "only the device counts a foreseen token"
        if kept.num_tokens < len(known):
            kept.add(known[kept.num_tokens :])
        return kept.followed_by(draft) if draft else kept
