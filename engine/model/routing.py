"""Which experts of a mixture compute a row, and their weights, by its router's logits.

A row's route does not depend on the other rows, and the host knows nothing of it. layers.py takes a route for each
mixture; engine/backends/cpu/csrc/rows_kernel.h computes the same.

Shape letters: T rows, L logits of a row, E experts that are chosen of, G groups of them, K experts of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gptserve.engine.model.activation import sigmoid
from gptserve.engine.model.linear import Affine
from gptserve.engine.model.loading import StreamedTensors
from gptserve.weights.config import Experts, Router


def take_route(
    shape: Experts, source: StreamedTensors, name: str, *, bias: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the function from rows to what `route` says of them, by the router of this name."""
    # Not quantized: it is small, and its errors would choose other experts.
    weight, its_bias = source.take(f"{name}.weight"), source.take(f"{name}.bias") if bias else None
    out_dtype = None if shape.router.is_plain else torch.float32  # small differences of scores choose, too
    router = source.linears[name] = source.maker.make(name, Affine(weight, its_bias, out_dtype=out_dtype))
    correction_E = None
    if shape.router.has_correction:
        correction_E = source.corrections[name] = source.take(f"{name}.correction")
    factors_E = None
    if shape.router.has_factors:
        factors_E = source.factors[name] = source.take(f"{name}.factors")
    return lambda x: route(shape, router(x), correction_E, factors_E)


def route(
    shape: Experts, logits_TL: Tensor, correction_E: Tensor | None = None, factors_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts [T, K] of each row, the shared ones last, and their fp32 weights; logits are [T, E] or more.

    `correction_E`, fp32, is what the shape's router adds to scores for the choice; `factors_E`, fp32, multiply weights.
    """
    logits_TE, router = logits_TL[:, : shape.num], shape.router
    if router.is_plain:
        top_TK, chosen_TK = choose(logits_TE, shape.num_active)
        weights_TK = weigh(top_TK, logits_TE, renormalised=router.renormalised)
    else:
        scores_TE = logits_TE.float().softmax(-1) if router.score == "softmax" else sigmoid(logits_TE.float())
        ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
        _, chosen_TK = choose(_within_groups(router, ranked_TE), shape.num_active)
        weights_TK = scores_TE.gather(1, chosen_TK)
        if router.renormalised:
            sums_T1 = weights_TK.sum(-1, keepdim=True) + router.sum_offset
            weights_TK = weights_TK / sums_T1.clamp(min=router.min_sum)
        weights_TK = weights_TK * router.scale
        weights_TK = weights_TK if factors_E is None else weights_TK * factors_E[chosen_TK]
    if not shape.num_shared:
        return chosen_TK, weights_TK
    size = len(logits_TL), shape.num_shared
    shared_TK = torch.arange(shape.num, shape.num_all, device=logits_TL.device).expand(size)
    if shape.has_shared_gate:
        gates_TK = sigmoid(logits_TL[:, shape.num :].float()).expand(size)
    else:
        gates_TK = weights_TK.new_full(size, shape.shared_weight)
    return torch.cat([chosen_TK, shared_TK], 1), torch.cat([weights_TK, gates_TK], 1)


def _within_groups(router: Router, ranked_TE: Tensor) -> Tensor:
    """Return what ranks experts, -inf outside the groups of which a row chooses; of equal groups the first."""
    if router.num_active_groups == router.num_groups:
        return ranked_TE
    ranked_TGE = ranked_TE.view(len(ranked_TE), router.num_groups, -1)
    _, groups_TK = choose(choose(ranked_TGE, 2)[0].sum(-1), router.num_active_groups)
    is_open_TG = torch.zeros(ranked_TGE.shape[:2], dtype=torch.bool, device=ranked_TE.device).scatter(
        1, groups_TK, True
    )
    return ranked_TGE.masked_fill(~is_open_TG.unsqueeze(-1), -math.inf).flatten(1)


def choose(logits_TE: Tensor, num_active: int) -> tuple[Tensor, Tensor]:
    """Return each row's highest logits in fp32 and their experts [T, K], the highest first; of equals the first expert.

    NaN ranks above all numbers, so that it is not passed over.
    """
    found_TE, experts_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    return found_TE[..., :num_active], experts_TE[..., :num_active]


def weigh(top_TK: Tensor, logits_TE: Tensor, *, renormalised: bool) -> Tensor:
    """Return the fp32 weights [T, K] of the highest logits: the softmax of these, or their part of that of all."""
    if renormalised:
        return top_TK.softmax(-1)
    return (top_TK - logits_TE.float().logsumexp(-1, keepdim=True)).exp()
