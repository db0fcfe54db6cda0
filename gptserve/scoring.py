"""How likely a text is to a model: windows over its tokens, and perplexity and bits per byte of what they score.

`LLM.score` computes the windows. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gptserve.engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of a text's scored tokens: all but the first, which has nothing before it.

    `logprob` is the sum of their log-probabilities (natural), `num_bytes` counts the bytes of their text.
    """

    num_tokens: int
    num_bytes: int
    logprob: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a token; infinite beyond what a float holds."""
        try:
            return math.exp(-self.logprob / self.num_tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """The bits that an ideal code by this model takes for a byte of the text. It does not depend on the tokenizer.

        NaN if the scored tokens have no text.
        """
        return -self.logprob / math.log(2) / self.num_bytes if self.num_bytes else math.nan


@dataclass(frozen=True, slots=True)
class Windows:
    """How a text is cut for a context of at most `size` tokens: each window begins `stride` tokens after the last one.

    The first window scores all its tokens but the first, each further one only those that the windows before have not:
    these see at least size - stride tokens. Raises InvalidRequestError.
    """

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise InvalidRequestError(f"window must be at least 2, got {self.size}", param="window")
        if not 1 <= self.stride < self.size:
            rule = f"in [1, {self.size - 1}], as a window has {self.size} tokens"
            raise InvalidRequestError(f"stride must be {rule}, got {self.stride}", param="stride")

    def over(self, token_ids: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the tokens of each window, and the index in it of the first one that it scores.

        Raises InvalidRequestError if there is none to score.
        """
        if len(token_ids) < 2:
            message = f"a text to score must have at least two tokens, got {len(token_ids)}"
            raise InvalidRequestError(message, param="texts")
        end = 0
        while end < len(token_ids):
            seen, end = end, min(len(token_ids), end + (self.stride if end else self.size))
            begin = max(0, end - self.size)
            yield tuple(token_ids[begin:end]), max(1, seen - begin)
