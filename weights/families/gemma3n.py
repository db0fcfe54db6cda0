"""Gemma 3n (text): inputs of layers and shared keys as in Gemma 4, several streams in place of one, a linear beside
attention, and gates of which all but the largest are cut off.

Google DeepMind, "Gemma 3n" (2025), https://ai.google.dev/gemma/docs/gemma-3n. Tokens that stand for images and sounds
are embedded as any other.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import (
    ACTIVATIONS,
    MAX_WIDTH,
    Family,
    RawConfig,
    Source,
    plain_config,
    with_kv_heads,
    with_windows,
)
from gptserve.weights.families.gemma4 import IGNORED_KEYS, IGNORED_OF_IMAGES, NAMES, with_rotary, with_shared_keys
from gptserve.weights.families.with_vision import text_of

_PATTERN = 5  # every fifth layer has no window
_NUM_CUT, _CUT = 10, 0.95
"""Of a file that does not say: how many layers cut their gates, and how many of these."""
_MAX_STREAMS = 64  # far above any model
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
}


def _read(raw: RawConfig) -> ModelConfig:
    raw.default(**_DEFAULTS)
    raw.skip("altup_coef_clip", "altup_lr_multiplier")  # of training
    raw.skip("query_pre_attn_scalar")
    raw.forbid("altup_active_idx", 0, "layers compute the first stream")
    raw.forbid("altup_correct_scale", True, "the first stream is scaled for the input of a layer")
    config = with_kv_heads(raw, plain_config(raw, head_size="head_dim", norm_eps=None))
    has_bias = raw.boolean("attention_bias", default=False)
    config = with_windows(raw, _with_feed_forwards(raw, config), lambda layer: (layer + 1) % _PATTERN > 0)
    config = config.change_layers(lambda layer: replace(layer, attention_scale=1.0))
    config = with_rotary(raw, config, local_theta=raw.positive("rope_local_base_freq", default=10_000.0))
    return replace(
        with_shared_keys(raw, config),
        qkv_bias=has_bias,
        attn_out_bias=has_bias,
        activation=raw.choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"),
        gated_ffn=True,
        ffn_bias=False,
        norm="rmsnorm",
        norm_eps=raw.positive("rms_norm_eps", default=1e-6),
        norm_bias=False,
        norm_placement="both",
        qk_norm="head",
        v_norm=True,
        embed_scale=math.sqrt(config.hidden_size),
        layer_input_size=raw.size("hidden_size_per_layer_input", default=256, limit=MAX_WIDTH),
        num_layer_inputs=raw.size("vocab_size_per_layer_input", default=262_144),
        streams=raw.size("altup_num_inputs", default=4, limit=_MAX_STREAMS),
        side_rank=raw.size("laurel_rank", default=64, limit=MAX_WIDTH),
        logit_softcap=raw.number("final_logit_softcapping"),
    )


def _with_feed_forwards(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the widths of feed-forwards, and with how many of their gates are cut off."""
    num, name = config.num_layers, "activation_sparsity_pattern"
    widths = raw.sizes("intermediate_size", length=num, limit=MAX_WIDTH)
    raw.default(**{name: [_CUT if layer < _NUM_CUT < num else 0.0 for layer in range(num)]}, replaces_null=True)
    shares = raw.fractions(name, length=num)
    cuts = [NormalDist().inv_cdf(share) if share else None for share in shares]
    layers = zip(config.layers, widths, cuts, strict=True)
    return replace(config, layers=tuple(replace(layer, ffn_size=width, gate_cut=cut) for layer, width, cut in layers))


_dense_sources = layout.decoder(NAMES)


def _sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors, those of streams and of what is beside attention too."""
    found, hidden, num, rank = _dense_sources(config), config.hidden_size, config.streams, config.side_rank
    assert num is not None, "_read sets it"
    assert rank is not None, "_read sets it"
    last = config.num_layers - 1
    for number in range(config.num_layers):
        block, stored = f"blocks.{number}.", f"layers.{number}."
        found |= layout.linear(f"{block}stream_router", [(f"{stored}altup.modality_router", num)], hidden, bias=False)
        found |= layout.linear(f"{block}side_in", [(f"{stored}laurel.linear_left", rank)], hidden, bias=False)
        found |= layout.linear(f"{block}side_out", [(f"{stored}laurel.linear_right", hidden)], rank, bias=False)
        wide = {
            "stream_predict": ("altup.prediction_coefs.weight", (num * num, num)),
            "stream_correct": ("altup.correction_coefs.weight", (num, num)),
            "stream_scale": ("altup.correct_output_scale", (hidden,)),
        }
        for name, (its, shape) in wide.items():
            found[f"{block}{name}"] = Source(((f"{stored}{its}", shape),), is_wide=True)
        for name, its in {"stream_norm": "altup.router_norm", "side_norm": "laurel.post_laurel_norm"}.items():
            found[f"{block}{name}.weight"] = Source(((f"{stored}{its}.weight", (hidden,)),))
    for kind, number, its in (("in", 0, "altup_projections"), ("out", last, "altup_unembed_projections")):
        for i in range(1, num):
            name = f"blocks.{number}.streams.{i}.stream_{kind}"
            found |= layout.linear(name, [(f"{its}.{i - 1}", hidden)], hidden, bias=False)
    return layout.in_order(found)


GEMMA3N = Family("gemma3n_text", _read, _sources, ignored=IGNORED_KEYS, models="Gemma 3n")
GEMMA3N_WITH_VISION = replace(
    text_of(
        "gemma3n",
        GEMMA3N,
        models="Gemma 3n",
        tied_head=True,
        defaults_of={
            "gemma3n_text": {
                "vocab_size": 262_400,
                "hidden_size": 2048,
                "intermediate_size": 16_384,
                "num_hidden_layers": 35,
                "num_attention_heads": 8,
                "max_position_embeddings": 32_768,
            }
        },
    ),
    ignored=f"{IGNORED_KEYS}|{IGNORED_OF_IMAGES}",
)
