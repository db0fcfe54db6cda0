"""Falcon: one key head for all queries (7B) or one for a group (11B, 40B), attention and feed-forward side by side.

Falcon RW has ALiBi, a key head for each query and one part after the other. Almazrouei et al., "The Falcon Series of
Open Language Models" (2023).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.bloom import alibi_slopes
from gptserve.weights.families.family import ACTIVATIONS, MAX_WIDTH, Family, RawConfig, Source, plain_config, with_ffn
from gptserve.weights.families.rotary import with_rotary

NAMES = {
    "embed": "word_embeddings",
    "blocks.{}.attn_norm": "h.{}.input_layernorm",
    "blocks.{}.qkv": "h.{}.self_attention.query_key_value",
    "blocks.{}.attn_out": "h.{}.self_attention.dense",
    "blocks.{}.ffn_norm": "h.{}.post_attention_layernorm",
    "blocks.{}.ffn_up": "h.{}.mlp.dense_h_to_4h",
    "blocks.{}.ffn_down": "h.{}.mlp.dense_4h_to_h",
    "final_norm": "ln_f",
    "head": "lm_head",
}
NORMS_OF_40B = {"blocks.{}.attn_norm": "h.{}.ln_attn", "blocks.{}.ffn_norm": "h.{}.ln_mlp"}
_NO_OTHER = "transformers computes no other"


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("apply_residual_connection_post_layernorm", False, _NO_OTHER)
    config = plain_config(raw, width="hidden_size" if "hidden_size" in raw else "n_embed", default_context=2048)
    config = with_ffn(config, raw.size("ffn_hidden_size", default=4 * config.hidden_size, limit=MAX_WIDTH))
    raw.forbid("ff_factor", config.layers[0].ffn_size // config.hidden_size, "ffn_hidden_size says it, too")
    is_of_40b = raw.boolean("new_decoder_architecture", default=False)
    if is_of_40b:
        raw.forbid("parallel_attn", True, _NO_OTHER)
        num_norms = raw.size("num_ln_in_parallel_attn", default=2, limit=2)
    else:
        raw.forbid("num_ln_in_parallel_attn", 1, _NO_OTHER)
        num_norms = 1
    is_parallel, has_bias = raw.boolean("parallel_attn", default=True), raw.boolean("bias", default=False)
    num_kv_heads = _num_kv_heads(raw, config.layers[0].num_heads, is_of_40b)
    config = config.change_layers(lambda layer: replace(layer, num_kv_heads=num_kv_heads))
    if raw.boolean("alibi", default=False):
        raw.skip("rope_parameters", "rope_scaling", "rope_theta")
        config = replace(config.change_layers(_with_alibi), position=None)
    else:
        config = with_rotary(raw, config)
    return replace(
        config,
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        activation=raw.choice("activation", ACTIVATIONS, default="gelu"),
        ffn_bias=has_bias,
        parallel_residual=is_parallel,
        shared_norm=is_parallel and num_norms == 1,
    )


def _num_kv_heads(raw: RawConfig, num_heads: int, is_of_40b: bool) -> int:
    if is_of_40b:
        raw.skip("multi_query")
        num = raw.size("num_kv_heads", default=num_heads)
        if num_heads % num:
            raise raw.error("num_kv_heads", f"a divisor of num_attention_heads ({num_heads})")
        return num
    if raw.boolean("multi_query", default=True):
        raw.skip("num_kv_heads")
        return 1
    raw.forbid("num_kv_heads", num_heads, _NO_OTHER)
    return num_heads


def _with_alibi(layer: LayerConfig) -> LayerConfig:
    """Return the layer with slopes as Falcon has them: rounded to bf16, and scaled like q.k."""
    slopes = (_in_bf16(slope) * layer.attention_scale for slope in alibi_slopes(layer.num_heads))
    return replace(layer, alibi_slopes=tuple(slopes))


def _in_bf16(x: float) -> float:
    """Return the number rounded to 8 bits, half to even."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 256), exponent - 8)


_shared = layout.decoder(NAMES, qkv_order=layout.heads_together)
_of_40b = layout.decoder({**NAMES, **NORMS_OF_40B}, qkv_order=layout.heads_together)


def _sources(config: ModelConfig) -> dict[str, Source]:
    has_both = config.parallel_residual and not config.shared_norm
    return _of_40b(config) if has_both else _shared(config)


IGNORED = r"h\.\d+\.self_attention\.rotary_emb\.inv_freq"
FALCON = Family("falcon", _read_config, _sources, ("transformer.",), IGNORED, models="Falcon 7B to 180B, RW")
