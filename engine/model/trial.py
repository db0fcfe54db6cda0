"""A few tokens that pass the layers of a model while it loads, each as soon as it is built.

So a weight may be packed by the rows that it will multiply. Decoder and its layers call a Trial, which knows nothing of
what its tokens are for; runner/input_squares.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from gptserve.engine.model.attention import AttentionMetadata
from gptserve.engine.model.linear import Linear
from gptserve.engine.model.rotary import Rotation
from gptserve.engine.model.states import State
from gptserve.weights.config import Rotary


class Layer(Protocol):
    """A block of layers.py."""

    def __call__(
        self,
        x: Tensor,
        term: Tensor | None,
        rotation: Rotation | None,
        cache_2NGBD: Tensor,
        state: State | None,
        metadata: AttentionMetadata,
        input_TI: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]: ...


ALayer = TypeVar("ALayer", bound=Layer)
Inputs = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Trial:
    """Takes the parts of a model in their order. This one computes nothing."""

    def begin(self, embed: Callable[[Tensor, Tensor], Tensor], inputs: Inputs | None) -> None:
        """Embed the tokens: `embed` returns the rows [T, hidden] of ids and positions, int64 [T].

        `inputs` returns the inputs of the layers, of ids and these rows, if the layers have any.
        """

    def computed(self, layer: ALayer, rotary: Rotary | None) -> ALayer:
        """Compute the next layer, which rotates so, if it does; return it."""
        return layer

    def end(self, states: Callable[[Tensor], Tensor]) -> None:
        """Take the last layer's rows: `states` returns them as the head reads them, fp32 [T, width]."""


class AwaitedLinear:
    """A Linear that is made when its first rows come, of these; `make` gets None if none are to come."""

    def __init__(self, make: Callable[[Tensor | None], Linear]) -> None:
        self._make: Callable[[Tensor | None], Linear] | None = make
        self._linear: Linear | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.made(x)(x, residual)

    def made(self, x: Tensor | None = None) -> Linear:
        """Return the linear, which is made of rows x [rows, in], or of none, unless it was."""
        if self._linear is None:
            assert self._make is not None
            self._linear, self._make = self._make(x), None
        return self._linear
