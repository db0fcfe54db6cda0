"""StableLM 3B and 2: Llama with LayerNorm and partly rotary heads; 2 12B has norms of heads with weights of their own.

Bellagente et al., "Stable LM 2 1.6B Technical Report" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config

NORMS = {
    "blocks.{}.q_norm": "layers.{}.self_attn.q_layernorm.norms.{{}}",
    "blocks.{}.k_norm": "layers.{}.self_attn.k_layernorm.norms.{{}}",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=32, partial_rotary_factor=0.25)
    config, is_parallel = read_llama_config(raw), raw.boolean("use_parallel_residual", default=False)
    return replace(
        config,
        qkv_bias=raw.boolean("use_qkv_bias", default=False),
        attn_out_bias=False,
        qk_norm="own" if raw.boolean("qk_layernorm", default=False) else None,
        norm="layernorm",
        norm_eps=raw.positive("layer_norm_eps", default=1e-5),
        norm_bias=True,
        parallel_residual=is_parallel,
        shared_norm=is_parallel,
    )


STABLELM = Family(
    "stablelm", _read_config, layout.decoder({**NAMES, **NORMS}), ignored=IGNORED, models="StableLM 3B and 2, Zephyr"
)
