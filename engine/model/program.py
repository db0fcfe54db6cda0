"""Programs, which compute whole steps in the place of a decoder: their interface.

decoder.py has one compiled of its parts, if a backend can; backends/cpu/decoder.py makes them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gptserve.engine.model.attention import AttentionBackend, Cache
from gptserve.engine.model.layout import StepArrays
from gptserve.engine.model.linear import Rows
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import ModelConfig


class Program(Protocol):
    """What computes whole steps in the place of a decoder."""

    def run(self, arrays: StepArrays, cache: Cache) -> object:
        """Compute a step and store its keys and values in the cache; the result lies where the program keeps it."""


class CompileProgram(Protocol):
    """Makes the program of a decoder."""

    def __call__(
        self,
        config: ModelConfig,
        parts: StreamedTensors,
        embedding: Rows,
        positions: Tensor | None,
        tables: list[Tensor | None],
        backend: AttentionBackend,
    ) -> Program | None:
        """Return the program, or None if it would compute other numbers or cannot compute this model.

        `parts` has made all linears and norms. `positions` is the table that is added to the embedding; `tables` has
        the rotary table of each layer.
        """
