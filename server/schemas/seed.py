"""The seed of a completion: the one that an answer names, and the number that the engine takes for it."""

from __future__ import annotations

import secrets

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import DRAWN_SEED_LIMIT, SEED_LIMIT

DRAW = -1
"""A seed that asks for a drawn one, as in vLLM and llama.cpp."""
LEAST_SEED, GREATEST_SEED = -(2**63), 2**63 - 1  # signed integers of 64 bits, as OpenAI's clients and vLLM's send them


def choose_seed(asked: int | None) -> int:
    """Return the seed of a new completion; for None and DRAW a drawn one."""
    return secrets.randbelow(DRAWN_SEED_LIMIT) if asked in (None, DRAW) else asked


def engine_seed(seed: int) -> int:
    """Return the number that the engine takes for a seed, another for each: a negative one has 2**64 added.

    Raises InvalidRequestError.
    """
    if not LEAST_SEED <= seed <= GREATEST_SEED:
        raise InvalidRequestError(f"seed must be in [-2**63, 2**63), got {seed}", param="seed")
    return seed % SEED_LIMIT
