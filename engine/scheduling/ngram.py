"""How many last tokens of a sequence are looked up for a draft. It imports nothing, as the server reads it."""

from __future__ import annotations

MIN_NGRAM = 2
"""A single token recurs too often to predict what follows."""
MAX_NGRAM = 8
"""Longer n-grams find no better place, and each n costs one index entry for each token."""
