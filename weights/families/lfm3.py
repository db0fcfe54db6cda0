"""LFM3: LFM2's convolutions between layers of gated attention, some with windows, and norms on both sides of a part."""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig, ShortConvolution
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source
from gptserve.weights.families.lfm2 import MAX_CONV_SIZE, NAMES
from gptserve.weights.families.llama import ATTENTION, IGNORED, read_llama_config
from gptserve.weights.families.rotary import with_rotary_by_kind

_KINDS = ("conv", "sliding_attention", "full_attention")
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_THETA},
    "full_attention": {"rope_type": "proportional", "rope_theta": _THETA, "partial_rotary_factor": 0.5},
}
_NAMES: layout.Names = {**NAMES, **ATTENTION, "blocks.{}.attn_gate": "layers.{}.self_attn.gate_proj"}
_BEHIND: layout.Names = {
    "blocks.{}.attn_output_norm": "layers.{}.post_operator_norm",
    "blocks.{}.ffn_output_norm": "layers.{}.post_ffn_norm",
}
_plain = layout.decoder(_NAMES)
_with_norms_behind = layout.decoder({**_NAMES, **_BEHIND})


def _read(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=128, num_key_value_heads=4, max_position_embeddings=128_000, tie_word_embeddings=True)
    raw.default(sliding_window=256)
    raw.default(rope_parameters=_ROPE, replaces_null=True)
    config = read_llama_config(raw, has_rotary=False, has_activation=False)
    eps = raw.positive("norm_eps", default=raw.positive("rms_norm_eps", default=1e-5))
    for name, value in {"mlp_bias": False, "hidden_act": "silu", "conv_bias": False}.items():
        raw.forbid(name, value, "no other is computed")
    kinds = raw.strings("layer_types", _KINDS, length=config.num_layers) or tuple(
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
        for i in range(config.num_layers)
    )
    if set(kinds) == {"conv"}:
        raise raw.error("layer_types", "a list with layers of attention")
    window = raw.size("sliding_window") if "sliding_attention" in kinds else None
    raw.skip("sliding_window")
    layers = zip(config.layers, kinds, strict=True)
    attending = (replace(layer, window=window if kind == "sliding_attention" else None) for layer, kind in layers)
    config = with_rotary_by_kind(raw, replace(config, layers=tuple(attending)), theta=_THETA, local_theta=_LOCAL_THETA)
    convolution = ShortConvolution(config.hidden_size, raw.size("conv_L_cache", default=7, limit=MAX_CONV_SIZE))
    convolving = LayerConfig(0, 0, 0, 1.0, config.layers[0].ffn_size, recurrence=convolution)
    has_norms = raw.boolean("use_sandwich_norm", default=True)
    return replace(
        config,
        layers=tuple(convolving if kind == "conv" else layer for layer, kind in zip(config.layers, kinds, strict=True)),
        activation="silu",
        qk_norm="head",
        norm_eps=eps,
        norm_placement="both" if has_norms else "input",
        attention_gate="sigmoid" if raw.boolean("use_attention_gate", default=True) else None,
        gates_heads=True,
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    return (_with_norms_behind if config.norm_placement == "both" else _plain)(config)


LFM3 = Family("lfm3", _read, _sources, ignored=IGNORED, models="LFM3")
