"""The operations of a layer between its products with weights: which of them are Triton kernels, which are torch's.

layers.py is given them with the weights; operations_choice.py chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptserve.engine.model.experts import ExpertProducts


@dataclass(frozen=True, slots=True)
class Operations:
    """What computes each operation; the defaults are torch's, which define it."""

    experts: ExpertProducts | None = None
    """None: the host starts the chosen experts one by one."""
    build: str = ""
    """What else decides the bits; empty if torch decides."""


TORCH = Operations()
