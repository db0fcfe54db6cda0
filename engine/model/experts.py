"""A mixture of experts, which replaces one feed-forward.

Each expert computes the rows that chose it. A row's result does not depend on the other rows. Only layers.py builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gptserve.engine.model.linear import MIN_ROWS, Linear


class MixtureOfExperts:
    """The sum of the num_active experts with the highest router logits, weighted by the softmax of these logits."""

    def __init__(self, router: Linear, experts: Sequence[Callable[[Tensor], Tensor]], num_active: int) -> None:
        self._router, self._experts, self._num_active = router, experts, num_active

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the mixture for x [T, hidden], summed in fp32, added to residual if given."""
        top_TK, chosen_TK = self._router(x).float().topk(self._num_active, dim=-1)
        weights_TK1 = top_TK.softmax(-1).unsqueeze(-1)
        parts_TKH = torch.empty(*chosen_TK.shape, x.shape[-1], dtype=torch.float32, device=x.device)
        # The host starts the chosen experts, so on a GPU this waits for the router.
        for e in sorted(set(chosen_TK.flatten().tolist())):
            rows, ranks = torch.where(chosen_TK == e)
            padding = max(0, MIN_ROWS - len(rows))
            h = functional.pad(x[rows], (0, 0, 0, padding))
            parts_TKH[rows, ranks] = self._experts[e](h)[: len(rows)].float()
        y = (parts_TKH * weights_TK1).sum(1).to(x.dtype)
        return y if residual is None else residual + y
