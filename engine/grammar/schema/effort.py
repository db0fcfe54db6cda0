"""How much work schemas have made so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Effort:
    """Work done for one request: many small schemas must not cost what a large one may not."""

    num_compared: int = 0
    """looks at options of a oneOf"""
    num_read: int = 0
    """looks at what a unit names"""
    num_written: int = 0
    """characters of names that rule out others"""
