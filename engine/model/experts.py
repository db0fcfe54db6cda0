"""A mixture of experts, which replaces one feed-forward.

A row's result does not depend on the other rows. On a GPU one kernel multiplies with the experts that any row chose,
and the host knows nothing of the choice; elsewhere each expert computes the rows that chose it. Only layers.py builds
either.

Shape letters: T rows, K experts of a row, P = T * K pairs of a row and an expert, E experts, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns the experts [T, K] of rows [T, hidden], and their fp32 weights; routing.py has it."""


class MixtureOfExperts:
    """The weighted sum of the experts of a row.

    engine/backends/cpu/csrc/experts.cpp computes the same.
    """

    def __init__(self, route: Route, experts: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._route, self._experts = route, experts

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, routed: Tensor | None = None) -> Tensor:
        """Return the mixture for x [T, hidden], summed in fp32, added to residual if given; the router reads `routed`.

        Without that it reads x.
        """
        chosen_TK, weights_TK = self._route(x if routed is None else routed)
        parts_TKH = torch.empty(*chosen_TK.shape, x.shape[-1], dtype=torch.float32, device=x.device)
        # The host starts the chosen experts, so on a GPU this waits for the router.
        for e in sorted(set(chosen_TK.flatten().tolist())):
            rows, ranks = torch.where(chosen_TK == e)
            parts_TKH[rows, ranks] = self._experts[e](x[rows]).float()
        y = (parts_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x.dtype)
        return y if residual is None else residual + y


class Routing(NamedTuple):
    """Who chose whom. Pair p is the choice p % K of row p // K."""

    pairs_P: Tensor
    """int64: the pairs by expert, those of one expert in ascending order"""
    starts_E1: Tensor
    """int32: expert e has the pairs starts[e]:starts[e+1] of these"""


class ExpertProducts(Protocol):
    """Products whose sizes and launches do not depend on the routing."""

    def multiply(
        self,
        x: Tensor,
        weight_ENI: Tensor,
        bias_EN: Tensor | None,
        routing: Routing,
        out_dtype: torch.dtype | None = None,
        scales_ENG: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b [P, N] of each pair, with its expert's weight, in out_dtype (x's by default).

        x is [P, I], or [T, I] with the row that all pairs of a row share. With scales the weight is in MXFP4: blocks
        [E, N, G, I / G / 2] for scales [E, N, G], both uint8.
        """

    def sum(self, parts_PN: Tensor, weights_TK: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum over a row's pairs [T, N] of fp32 parts and weights, added to residual if given."""


class GroupedExperts:
    """MixtureOfExperts for a GPU: the same operations for any routing, so that a graph can record them."""

    def __init__(
        self,
        route: Route,
        weights: dict[str, Tensor],
        activate: Callable[[Tensor], Tensor],
        products: ExpertProducts,
    ) -> None:
        """Take `weights` of `stack`; `activate` maps an output of ffn_up to an input of ffn_down."""
        self._route, self._weights, self._activate, self._products = route, weights, activate, products
        up = weights["ffn_up.weight"]
        self._bounds_E1 = torch.arange(len(up) + 1, device=up.device)

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, routed: Tensor | None = None) -> Tensor:
        """Return what MixtureOfExperts returns."""
        chosen_TK, weights_TK = self._route(x if routed is None else routed)
        experts_P, pairs_P = chosen_TK.flatten().sort(stable=True)
        routing = Routing(pairs_P, torch.searchsorted(experts_P, self._bounds_E1, out_int32=True))
        h = self._activate(self._multiply(x, "ffn_up", routing, x.dtype))
        parts = self._multiply(h, "ffn_down", routing, torch.float32)
        return self._products.sum(parts, weights_TK, residual, x.dtype)

    def _multiply(self, x: Tensor, linear: str, routing: Routing, out_dtype: torch.dtype) -> Tensor:
        weight, bias, scales = (self._weights.get(f"{linear}.{kind}") for kind in ("weight", "bias", "scales"))
        assert weight is not None
        return self._products.multiply(x, weight, bias, routing, out_dtype, scales)


def stack(take: Callable[[str], Tensor], name: str, num: int, has_bias: bool) -> dict[str, Tensor]:
    """Return each tensor of the experts {name}.experts.{e} as one of all experts; they are taken one by one.

    A weight in MXFP4, uint8, has scales beside it.
    """
    stacked: dict[str, Tensor] = {}

    def add(part: str, e: int) -> Tensor:
        tensor = take(f"{name}.experts.{e}.{part}")
        if part not in stacked:
            stacked[part] = tensor.new_empty(num, *tensor.shape)
        stacked[part][e] = tensor
        return tensor

    for e, linear in product(range(num), ("ffn_up", "ffn_down")):
        if add(f"{linear}.weight", e).dtype is torch.uint8:
            add(f"{linear}.scales", e)
        if has_bias:
            add(f"{linear}.bias", e)
    return stacked
