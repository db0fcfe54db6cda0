"""What families with mixtures of experts read alike: numbers of experts, routers by corrected sigmoids, layers.

Families call it; it knows no model_type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router, Score
from gptserve.weights.families.family import RawConfig
from gptserve.weights.families.mixtral import MAX_EXPERTS

MIN_SUM = 1e-20
"""Of the scores by which DeepSeek's routers divide."""
_SCORES: Mapping[str, Score] = {"sigmoid": "sigmoid", "noaux_tc": "sigmoid"}
"""dots.llm1 has the name of DeepSeek V3's choice here, too."""


def read_num_experts(raw: RawConfig, names: tuple[str, ...], num_layers: int, default: int | None = None) -> int:
    """Return the number of experts of a layer, under the first of these names that the file has."""
    present = [name for name in names if raw.value(name) is not None]
    return raw.size((present or names)[0], default=default, limit=max(1, MAX_EXPERTS // num_layers))


def read_deepseek_experts(raw: RawConfig, config: ModelConfig, *, num: int | None, renormalised: bool) -> Experts:
    """Return the mixture of DeepSeek V3: corrected sigmoids, groups, and shared experts (arXiv 2412.19437, 2.1.2).

    `num` experts and `renormalised` are for a file that does not say.
    """
    raw.forbid("topk_method", "noaux_tc", "transformers has no other for this model_type")
    raw.forbid("moe_layer_freq", 1, "transformers has no other for this model_type")
    num = read_num_experts(raw, ("n_routed_experts", "num_local_experts"), config.num_layers, num)
    num_groups = raw.size("n_group", default=1, limit=max(1, num // 2))
    if num % num_groups:
        raise raw.error("n_group", f"a divisor of n_routed_experts ({num})")
    num_active_groups = raw.size("topk_group", default=1, limit=num_groups)
    num_active = raw.size("num_experts_per_tok", limit=num // num_groups * num_active_groups)
    router = Router(
        raw.choice("scoring_func", _SCORES, default="sigmoid"),
        has_correction=True,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
        renormalised=raw.boolean("norm_topk_prob", default=renormalised),
        min_sum=MIN_SUM,
        scale=raw.positive("routed_scaling_factor", default=1.0),
    )
    return Experts(num, num_active, router, num_shared=raw.count("n_shared_experts"))


def read_mixing(raw: RawConfig, num_layers: int, *, num_dense: int) -> tuple[bool, ...]:
    """Return which layers mix, by `mlp_layer_types`, or else all but the first `num_dense`."""
    kinds = raw.strings("mlp_layer_types", ("dense", "sparse"), length=num_layers)
    return tuple(i >= num_dense if kinds is None else kinds[i] == "sparse" for i in range(num_layers))


def with_mixtures(config: ModelConfig, experts: Experts, width: int, mixes: Callable[[int], bool]) -> ModelConfig:
    """Return the configuration with experts of this width on the layers that mix; all others stay as they are."""
    layers = [
        replace(layer, experts=experts, ffn_size=width) if mixes(i) else layer for i, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))
