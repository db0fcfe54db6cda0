"""Command R: attention and feed-forward side by side after one LayerNorm, scaled logits. Command R+ has norms of heads,
too, each with weights of its own, Command R7B and A windows on three layers of four, and positions on these alone.
Command A+ has mixtures, too, of whose shared and chosen experts it takes the mean.

Cohere, "Command A: An Enterprise-Ready Large Language Model" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig, Router, Score
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig, with_ffn, with_windows
from gptserve.weights.families.glm4_moe import SHARED
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config
from gptserve.weights.families.mixtures import read_mixing, read_num_experts, with_mixtures
from gptserve.weights.families.qwen_moe import with_qwen_experts

_SCORES: Mapping[str, Score] = {"softmax": "softmax", "sigmoid": "sigmoid"}
PATTERN = 4  # every fourth layer has no window

AS_PUBLISHED: dict[str, object] = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
"""Fields of Cohere's own code, which transformers does not read."""


def _read_cohere(raw: RawConfig) -> ModelConfig:
    raw.default(rope_theta=500_000.0)
    has_norms = raw.boolean("use_qk_norm", default=False)
    return replace(_read_shared(raw), qk_norm="own" if has_norms else None)


def _read_cohere2(raw: RawConfig) -> ModelConfig:
    config = _read_windows(raw, num_dense=0)
    return config.change_layers(lambda layer: layer if layer.window is not None else replace(layer, rotary=None))


def _read_moe(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=128)
    raw.skip("num_nextn_predict_layers", "prefix_dense_intermediate_size")  # the latter of no layer
    num_dense = raw.count("first_k_dense_replace", limit=MAX_LAYERS)
    config = _read_windows(raw, num_dense=num_dense)
    if "rms_norm_eps" in raw:
        config = replace(config, norm="rmsnorm", norm_eps=raw.positive("rms_norm_eps", default=1e-5))
    num = read_num_experts(raw, ("num_experts", "num_local_experts"), config.num_layers, 8)
    num_shared = raw.count("num_shared_experts")
    mean = raw.choice("shared_expert_combination_strategy", {"average": 0.5, "sum": 1.0}, default="average")
    mean = mean if num_shared else 1.0
    score = raw.choice("expert_selection_fn", _SCORES, default="softmax")
    is_divided = raw.boolean("norm_topk_prob", default=True) or score == "softmax"
    router = Router(score, renormalised=is_divided, scale=mean)
    num_active = raw.size("num_experts_per_tok", default=2, limit=num)
    experts = Experts(num, num_active, router, num_shared, shared_weight=mean)
    width = config.layers[0].ffn_size
    mixes = read_mixing(raw, config.num_layers, num_dense=num_dense)
    if not all(mixes):
        config = with_ffn(config, raw.size("prefix_dense_intermediate_size", limit=MAX_WIDTH))
    turns_all = raw.size("prefix_dense_sliding_window_pattern", default=1) == 1
    layers = (
        layer if layer.window is not None or (turns_all and not its) else replace(layer, rotary=None)
        for layer, its in zip(config.layers, mixes, strict=True)
    )
    return with_mixtures(replace(config, layers=tuple(layers)), experts, width, mixes.__getitem__)


def _read_windows(raw: RawConfig, *, num_dense: int) -> ModelConfig:
    """Return the fields with windows; the first `num_dense` layers have a pattern of their own."""
    raw.default(sliding_window=4096)
    raw.skip("use_parallel_embedding")  # how training splits it
    for name, value in AS_PUBLISHED.items():
        raw.forbid(name, value, "no published model has another")
    pattern = raw.size("sliding_window_pattern", default=raw.size("_sliding_window_pattern", default=PATTERN))
    raw.forbid("layer_switch", pattern, "it is another name of sliding_window_pattern")
    of_dense = raw.size("prefix_dense_sliding_window_pattern", default=1)

    def slides(layer: int) -> bool:
        return (layer + 1) % of_dense > 0 if layer < num_dense else (layer - num_dense + 1) % pattern > 0

    return with_windows(raw, _read_shared(raw), slides)


def _read_shared(raw: RawConfig) -> ModelConfig:
    raw.default(tie_word_embeddings=True)
    return replace(
        read_llama_config(raw),
        parallel_residual=True,
        shared_norm=True,
        norm="layernorm",
        norm_eps=raw.positive("layer_norm_eps", default=1e-5),
        logit_scale=raw.positive("logit_scale", default=0.0625),
    )


_sources = layout.decoder(NAMES, qkv_order=layout.halves_apart)
COHERE = Family("cohere", _read_cohere, _sources, ignored=IGNORED, models="Command R and R+, Aya Expanse")
_moe_sources = with_qwen_experts(_sources, shared=SHARED)
COHERE2_MOE = Family(
    "cohere2_moe", _read_moe, _moe_sources, ignored=rf"{IGNORED}|mtp\..*", models="Command A+, text only"
)
COHERE2 = Family("cohere2", _read_cohere2, _moe_sources, ignored=IGNORED, models="Command R7B and A")
