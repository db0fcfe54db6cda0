"""Normalisation over the last dimension, in and out in the model's dtype, computed in fp32.

layers.py builds one `Norm` for each norm of the model; cpu/decoder.py reads what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.weights import config


def normalize_by_torch(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """Return the norm of x, added to residual if given."""
    if norm.kind == "layernorm" and norm.weight is not None and norm.has_own_weights:
        y = (functional.layer_norm(x.float(), x.shape[-1:], eps=norm.eps) * norm.weight).to(x.dtype)
    elif norm.kind == "layernorm":
        y = functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    else:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        y = (wide if norm.weight is None else wide * norm.weight).to(x.dtype)
    return y if residual is None else residual + y


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm with the weight and the bias that it has. With a weight [X, D] it is of [T, X, D], and has no bias.

    - layernorm: layer normalisation (Ba et al. 2016, equation 4)
    - rmsnorm: root mean square normalisation (Zhang and Sennrich 2019, equation 4); its weight is in fp32
    """

    kind: config.Norm
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    normalize: Callable[[Tensor, Norm, Tensor | None], Tensor] = normalize_by_torch

    @property
    def has_own_weights(self) -> bool:
        """Whether each of the X vectors of a row has weights of its own."""
        return self.weight is not None and self.weight.dim() == 2

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm of x, added to residual if given."""
        return self.normalize(x, self, residual)


def normalize_heads_(norms: Sequence[Norm], heads: Sequence[Tensor], *, of_each: bool) -> None:
    """Normalize queries, keys and values [T, X, D] in place, those that have norms: each head, or all as one."""
    for norm, heads_TXD in zip(norms, heads, strict=False):
        normed = norm(heads_TXD if of_each else heads_TXD.flatten(1))
        heads_TXD.copy_(normed.view_as(heads_TXD))
