"""LFM2 and LFM2.5: gated convolutions over the latest tokens, and some layers of attention; dense or with experts.

Liquid AI, "LFM2 Technical Report" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gptserve.weights.config import Experts, LayerConfig, ModelConfig, Router, ShortConvolution
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_LAYERS, MAX_WIDTH, Family, RawConfig, with_ffn
from gptserve.weights.families.llama import EMBED, IGNORED, read_llama_config
from gptserve.weights.families.mixtures import read_num_experts, with_mixtures
from gptserve.weights.families.rotary import with_rotary

_KINDS = ("conv", "full_attention")
MAX_CONV_SIZE = 64
_SUM_OFFSET = 1e-6
_LAYER = "layers.{}."
_FFN = f"{_LAYER}feed_forward."
NAMES: layout.Names = {
    **EMBED,
    "blocks.{}.attn_norm": f"{_LAYER}operator_norm",
    "blocks.{}.ffn_norm": f"{_LAYER}ffn_norm",
    "blocks.{}.qkv": tuple(f"{_LAYER}self_attn.{part}_proj" for part in "qkv"),
    "blocks.{}.q_norm": f"{_LAYER}self_attn.q_layernorm",
    "blocks.{}.k_norm": f"{_LAYER}self_attn.k_layernorm",
    "blocks.{}.attn_out": f"{_LAYER}self_attn.out_proj",
    "blocks.{}.conv_in": f"{_LAYER}conv.in_proj",
    "blocks.{}.conv_factors": f"{_LAYER}conv.conv",
    "blocks.{}.conv_out": f"{_LAYER}conv.out_proj",
    "blocks.{}.ffn_up": (f"{_FFN}w1", f"{_FFN}w3"),
    "blocks.{}.ffn_down": f"{_FFN}w2",
    "final_norm": "embedding_norm",
    "head": "lm_head",
}
_IGNORED = rf"{IGNORED}|pos_emb\.inv_freq"


def read_lfm2_config(raw: RawConfig) -> ModelConfig:
    """Return the fields of LFM2's dense models."""
    numbers = raw.integers("full_attn_idxs") if "full_attn_idxs" in raw else None
    config = _read(raw, "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size", numbers)
    return config.change_layers(lambda layer: replace(layer, ffn_size=_adjusted(raw, layer.ffn_size)))


def _read_lfm2_moe(raw: RawConfig) -> ModelConfig:
    raw.default(num_experts=32, num_experts_per_tok=4)
    config = _read(raw, "intermediate_size", None)
    num = read_num_experts(raw, ("num_experts",), config.num_layers)
    router = Router(
        "sigmoid",
        has_correction=raw.boolean("use_expert_bias", default=True),
        renormalised=raw.boolean("norm_topk_prob", default=True),
        sum_offset=_SUM_OFFSET,
        scale=raw.positive("routed_scaling_factor", default=1.0),
    )
    experts = Experts(num, raw.size("num_experts_per_tok", limit=num), router)
    width = raw.size("moe_intermediate_size", default=1792, limit=MAX_WIDTH)
    num_dense = raw.count("num_dense_layers", default=2, limit=MAX_LAYERS)
    return with_mixtures(config, experts, width, lambda layer: layer >= num_dense)


def _read(raw: RawConfig, width: str, attending: Sequence[int] | None) -> ModelConfig:
    """Return what both have in common; `width` names that of feed-forwards.

    Without layer_types the layers of the numbers in `attending` have attention, all where it is None.
    """
    raw.default(num_key_value_heads=8, max_position_embeddings=128_000, tie_word_embeddings=True)
    raw.default(intermediate_size=raw.value(width))
    config = with_ffn(read_llama_config(raw, has_rotary=False, has_activation=False), raw.size(width, limit=MAX_WIDTH))
    config = with_rotary(raw, config, theta=1_000_000.0)
    hidden = config.hidden_size
    eps = raw.positive("norm_eps", default=1e-5)
    always = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": eps, "conv_bias": False}
    of_early_files = {"block_norm_eps": eps, "block_use_swiglu": True, "use_pos_enc": True}
    sizes = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), hidden) | {"num_heads": config.layers[0].num_heads}
    for name, value in (always | of_early_files | sizes).items():
        raw.forbid(name, value, "no other is computed")
    raw.skip("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    convolution = ShortConvolution(hidden, raw.size("conv_L_cache", default=3, limit=MAX_CONV_SIZE))
    kinds = raw.strings("layer_types", _KINDS, length=config.num_layers)

    def layer_of(number: int, layer: LayerConfig) -> LayerConfig:
        attends = attending is None or number in attending if kinds is None else kinds[number] == "full_attention"
        return layer if attends else LayerConfig(0, 0, 0, 1.0, layer.ffn_size, recurrence=convolution)

    layers = tuple(layer_of(i, layer) for i, layer in enumerate(config.layers))
    if all(layer.recurrence is not None for layer in layers):
        raise raw.error("layer_types", "a list with a full_attention")
    return replace(
        config,
        layers=layers,
        activation="silu",
        qk_norm="head",
        norm_eps=eps,
        tied_head=raw.boolean("tie_embedding", default=config.tied_head),
    )


def _adjusted(raw: RawConfig, width: int) -> int:
    """Return the width of a gated feed-forward of as many weights as a plain one of this width, rounded up."""
    factor = raw.positive("block_ffn_dim_multiplier", default=1.0)
    multiple = raw.size("block_multiple_of", default=256, limit=MAX_WIDTH)
    if not raw.boolean("block_auto_adjust_ff_dim", default=True):
        return width
    adjusted = factor * int(2 * width / 3)
    if adjusted > MAX_WIDTH:
        raise raw.error("block_ffn_dim_multiplier", f"a factor that gives no width above {MAX_WIDTH}")
    found = -(-int(adjusted) // multiple) * multiple
    if not found:
        raise raw.error("block_ffn_dim_multiplier", "a factor that gives a width of 1 or more")
    return found


_dense = layout.decoder(NAMES)
_mixed = layout.with_experts(
    _dense,
    f"{_FFN}gate",
    tuple(f"{_FFN}experts.{{}}.w{part}" for part in (1, 3)),
    f"{_FFN}experts.{{}}.w2",
    correction=f"{_FFN}expert_bias",
)
LFM2 = Family("lfm2", read_lfm2_config, _dense, ignored=_IGNORED, models="LFM2, LFM2.5")
LFM2_MOE = Family("lfm2_moe", _read_lfm2_moe, _mixed, ignored=_IGNORED, models="LFM2 with experts")
