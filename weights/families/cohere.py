"""Command R: attention and feed-forward side by side after one LayerNorm, scaled logits. Command R+ has norms of heads,
too, each with weights of its own, Command R7B and A windows on three layers of four, and positions on these alone.

Cohere, "Command A: An Enterprise-Ready Large Language Model" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config

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
    raw.default(sliding_window=4096)
    raw.skip("use_parallel_embedding")  # how training splits it
    for name, value in AS_PUBLISHED.items():
        raw.forbid(name, value, "no published model has another")
    pattern = raw.size("sliding_window_pattern", default=raw.size("_sliding_window_pattern", default=PATTERN))
    raw.forbid("layer_switch", pattern, "it is another name of sliding_window_pattern")
    config = with_windows(raw, _read_shared(raw), lambda layer: (layer + 1) % pattern > 0)
    return config.change_layers(lambda layer: layer if layer.window is not None else replace(layer, rotary=None))


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
COHERE2 = Family("cohere2", _read_cohere2, _sources, ignored=IGNORED, models="Command R7B and A")
