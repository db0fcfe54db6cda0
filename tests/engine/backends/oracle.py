"""What every backend must compute: attention by its formula, dense and in fp64, and specs with every feature of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from gptserve.engine.model.attention import AttentionSpec

Feature = Literal["alibi_slopes", "sinks", "softcap"]

FEATURES: tuple[Feature, ...] = ("alibi_slopes", "sinks", "softcap")
"""The fields of AttentionSpec that bend the scores or the softmax."""
FEATURE_SETS = [features for n in range(4) for features in combinations(FEATURES, n)]


def with_features(spec: AttentionSpec, features: tuple[Feature, ...]) -> AttentionSpec:
    """Return the spec with values of these features that change every result much: sinks as high as scores are."""
    values: dict[Feature, Tensor | float] = {
        "alibi_slopes": bloom_slopes(spec.num_heads),
        "sinks": torch.linspace(-1, 4, spec.num_heads),
        "softcap": 1.5,
    }
    return replace(spec, **{name: values[name] for name in features})


def feature_id(features: tuple[Feature, ...]) -> str:
    return "+".join(features) or "plain"


def bloom_slopes(num_heads: int) -> Tensor:
    """Return BLOOM's ALiBi slopes: 2^(-8i/n) for n a power of two; further heads take the odd ones of 2n."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return torch.tensor(slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)])


def dense_attention(query_LHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, spec: AttentionSpec) -> Tensor:
    """Return [L, H, D] in fp64; the rows are the last L of K positions."""
    group = spec.num_heads // spec.num_kv_heads
    query_HLD = query_LHD.double().transpose(0, 1)
    key_HKD, value_HKD = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (key_KGD, value_KGD))
    positions = torch.arange(len(key_KGD))
    distance_LK = positions - positions[len(key_KGD) - len(query_LHD) :, None]
    scores_HLK = query_HLD @ key_HKD.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores_HLK = spec.softcap * torch.tanh(scores_HLK / spec.softcap)
    if spec.alibi_slopes is not None:
        scores_HLK += spec.alibi_slopes.double()[:, None, None] * distance_LK
    seen_LK = distance_LK <= 0
    if spec.window is not None:
        seen_LK &= distance_LK > -spec.window
    scores_HLK = scores_HLK.where(seen_LK, -math.inf)
    sinks_H = torch.full((spec.num_heads,), -math.inf) if spec.sinks is None else spec.sinks
    sinks_HL1 = sinks_H.double()[:, None, None].expand(-1, len(query_LHD), 1)
    return (torch.cat([scores_HLK, sinks_HL1], -1).softmax(-1)[..., :-1] @ value_HKD).transpose(0, 1)
