"""Normalisation over the last dimension, in and out in the model's dtype, computed in fp32.

layers.py builds one `Norm` for each norm of the model; native_decoder.py reads what it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.weights import config


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm with the weight and the bias that it has.

    - layernorm: layer normalisation (Ba et al. 2016, equation 4)
    - rmsnorm: root mean square normalisation (Zhang and Sennrich 2019, equation 4); its weight is in fp32
    """

    kind: config.Norm
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "layernorm":
            return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (y if self.weight is None else y * self.weight).to(x.dtype)
