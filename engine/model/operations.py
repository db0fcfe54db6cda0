"""The operations of a layer between its products with weights: which of them are Triton kernels, which are torch's.

layers.py is given them with the weights; selfcheck/operations.py chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gptserve.engine.model.activation import gated
from gptserve.engine.model.experts import ExpertProducts
from gptserve.engine.model.norm import Norm, normalize_by_torch
from gptserve.engine.model.rotary import Rotation
from gptserve.weights.config import Activation, ModelConfig
from gptserve.weights.quantized.mxfp4 import MXFP4
from gptserve.weights.quantized.stored_type import StoredType


@dataclass(frozen=True, slots=True)
class Operations:
    """What computes each operation; the defaults are torch's, which define it."""

    normalize: Callable[[Tensor, Norm, Tensor | None], Tensor] = normalize_by_torch
    add_normalize: Callable[[Tensor, Tensor, Norm], tuple[Tensor, Tensor]] | None = None
    """Returns x + term and the norm of this sum. None: a product adds its residual itself."""
    rotate_and_write: Callable[[Tensor, Rotation, Tensor, Tensor], None] | None = None
    """Rotates the queries of heads [T, H + 2 * G, D] in place, and stores their rotated keys and their values at
    slots [T] of the cache [2, N, G, B, D]; what it leaves in the place of the keys is not defined. A row with slot -1
    stores nothing. None: rotate_, and then the backend's write."""
    gate: Callable[[Tensor, Activation, float | None], Tensor] = gated
    experts: ExpertProducts | None = None
    """None: the host starts the chosen experts one by one."""
    mxfp4_experts: ExpertProducts | None = None
    """The same, proved with weights in MXFP4; None: these are unpacked while they load."""
    build: str = ""
    """What decides the bits where it is not torch: Triton's version, and the names of its kernels."""

    @property
    def keeps(self) -> frozenset[StoredType]:
        """The stored types with which `experts` multiplies as they are."""
        return frozenset([MXFP4] if self.experts is not None and self.mxfp4_experts is not None else [])

    def host_starts_experts(self, model: ModelConfig) -> bool:
        """Whether the host must know which experts are chosen, before it can start them."""
        return model.has_experts and self.experts is None


TORCH = Operations()


WritePart = Callable[[str, str, str], None]
"""Writes attention or a feed-forward: it reads one buffer and writes another, plus a residual, or "" for none."""


class BlockWriter(Protocol):
    """Writes the operations of a block as a program over named buffers: x is the residual stream."""

    def norm(self, name: str, source: str, target: str) -> None:
        """Write the norm of this name, from one buffer to another or in place."""

    def copy(self, source: str, target: str) -> None:
        """Write a copy."""

    def add(self, target: str, term: str) -> None:
        """Write that the term is added to the target."""

    def linear(self, name: str, source: str, target: str) -> None:
        """Write the linear of this name."""

    def embed(self, name: str, target: str) -> None:
        """Write the rows of tokens of the table of this name, times its factor, to the target."""

    def multiply(self, target: str, factors: str, first: int) -> None:
        """Write that the target is multiplied by as many elements of factors, from `first` on."""

    def scale(self, name: str, target: str) -> None:
        """Write that the target is multiplied by the number of the layer of this name."""


class StreamWriter(BlockWriter, Protocol):
    """Writes what a block computes of several streams, in buffers named "stream 0" and so on."""

    def match(self, target: str, like: str) -> None:
        """Write that the target gets the length of `like`."""

    def predict(self, name: str) -> None:
        """Write what the layer of this name predicts of all streams, in place, of their "stream_logits"."""

    def correct(self, name: str) -> None:
        """Write how the layer of this name corrects all streams, in place, of x and its "stream_logits"."""

    def scale_each(self, name: str, target: str) -> None:
        """Write that the target is multiplied by the vector of the layer of this name."""
