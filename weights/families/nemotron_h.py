"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano: blocks of Mamba-2, attention, feed-forwards and mixtures in any order.

NVIDIA, "Nemotron-H" (2025), "Nemotron 3 Nano" (2025). A block of a feed-forward is a part of the layer of the block
before it if that mixes tokens.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig, StateSpace
from gptserve.weights.families import layout
from gptserve.weights.families.family import (
    ACTIVATIONS,
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    RawConfig,
    Source,
    plain_config,
    with_kv_heads,
)
from gptserve.weights.families.mamba import MAX_CONV_SIZE, check_mixer, mixer_sources, read_step_limits
from gptserve.weights.families.mixtures import read_deepseek_experts

_OF_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {its: its for its in _OF_LETTERS.values()}
_UNREAD = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "use_mamba_kernels", "num_nextn_predict_layers", "mtp_layers_block_type"),
    *("mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor", "num_hidden_layers", "residual_in_fp32"),
    # of training; transformers takes the first for the least step, too, but the makers' code does not
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
    # of experts, if there are none
    *(
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
    ),
    *("norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group", "intermediate_size"),
)


def _read(raw: RawConfig) -> ModelConfig:
    raw.default(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=131_072)
    raw.default(max_position_embeddings=4096, layer_norm_epsilon=1e-5)
    for name in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"):
        raw.forbid(name, False, "no model with biases is published")
    raw.forbid("mamba_hidden_act", "silu", "convolutions of Mamba-2 have no other here")
    raw.forbid("sliding_window", None, "transformers has none for this model_type")
    raw.forbid("moe_latent_size", None, "experts that read latents are not computed")
    kinds = _read_kinds(raw)
    raw.default(num_hidden_layers=len(kinds), replaces_null=True)
    config = with_kv_heads(raw, plain_config(raw, head_size="head_dim", tied_head=False, norm_eps="layer_norm_epsilon"))
    again = {
        "attention_head_dim": config.layers[0].head_size,
        "norm_eps": config.norm_eps,
        "rms_norm_eps": config.norm_eps,
    }
    for name, value in again.items():
        raw.forbid(name, value, "it must be what the other name says")
    layers = _layers(raw, replace(config, layers=(replace(config.layers[0], ffn_size=0),) * len(kinds)), kinds)
    raw.skip(*_UNREAD)
    return replace(
        config,
        layers=tuple(layers),
        position=None,
        qkv_bias=False,
        attn_out_bias=False,
        activation=raw.choice("mlp_hidden_act", ACTIVATIONS, default="relu2"),
        ffn_bias=False,
        norm="rmsnorm",
        norm_bias=False,
    )


def _read_kinds(raw: RawConfig) -> list[str]:
    """Return the kind of each block."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    name = next((name for name in names if name in raw), names[0])
    raw.skip(*names)
    kinds = raw.value(name, ["mamba", "moe", "attention", "mlp"])
    of_kinds = _OF_LETTERS if name == names[2] else _KINDS
    num = len(kinds) if isinstance(kinds, str if name == names[2] else list) else 0
    if not isinstance(kinds, str | list) or not 1 <= num <= MAX_LAYERS or not set(map(str, kinds)) <= of_kinds.keys():
        what = f"{'letters' if name == names[2] else 'a list'}, at most {MAX_LAYERS}"
        raise raw.error(name, f"{what}, each one of {', '.join(of_kinds)}")
    return [of_kinds[kind] for kind in kinds]


def _layers(raw: RawConfig, config: ModelConfig, kinds: list[str]) -> list[LayerConfig]:
    """Return a layer for each block that mixes tokens, with the feed-forward behind it, and for any other one."""
    changes = _read_feed_forwards(raw, config, kinds)
    space = _read_space(raw, config) if "mamba" in kinds else None
    mixers = {"attention": config.layers[0], "mamba": LayerConfig(0, 0, 0, 1.0, 0, recurrence=space)}
    layers = list[LayerConfig]()
    for kind in kinds:
        if kind in mixers:
            layers.append(mixers[kind])
        elif layers and not layers[-1].ffn_size:
            layers[-1] = replace(layers[-1], ffn_size=changes[kind].ffn_size, experts=changes[kind].experts)
        else:
            layers.append(replace(changes[kind], num_heads=0, num_kv_heads=0, head_size=0, attention_scale=1.0))
    return layers


def _read_feed_forwards(raw: RawConfig, config: ModelConfig, kinds: list[str]) -> dict[str, LayerConfig]:
    """Return layers that have what those of these kinds have beside what mixes tokens."""
    found = dict[str, LayerConfig]()
    if "mlp" in kinds:
        width = raw.size("intermediate_size", default=21_504, limit=MAX_WIDTH)
        found["mlp"] = replace(config.layers[0], ffn_size=width)
    if "moe" in kinds:
        raw.default(num_experts_per_tok=2, n_shared_experts=1)
        experts = read_deepseek_experts(raw, config, num=8, renormalised=True)
        width = raw.size("moe_intermediate_size", default=7688, limit=MAX_WIDTH)
        shared = raw.size("moe_shared_expert_intermediate_size", default=7688, limit=MAX_WIDTH)
        if shared % width:
            raise raw.error("moe_shared_expert_intermediate_size", f"a multiple of moe_intermediate_size ({width})")
        experts = replace(experts, num_shared=shared // width)
        found["moe"] = replace(config.layers[0], ffn_size=width, experts=experts)
    return found


def _read_space(raw: RawConfig, config: ModelConfig) -> StateSpace:
    raw.default(use_conv_bias=True)
    num_heads, num_groups = raw.size("mamba_num_heads", default=128), raw.size("n_groups", default=8)
    if num_heads % num_groups:
        raise raw.error("mamba_num_heads", f"a multiple of n_groups ({num_groups})")
    space = StateSpace(
        num_groups,
        num_heads,
        key_size=raw.size("ssm_state_size", default=128, limit=MAX_WIDTH),
        value_size=raw.size("mamba_head_dim", default=64, limit=MAX_WIDTH),
        conv_size=raw.size("conv_kernel", default=4, limit=MAX_CONV_SIZE),
        norm_eps=config.norm_eps,
        step_limits=read_step_limits(raw, "time_step_limit"),
        has_conv_bias=raw.boolean("use_conv_bias", default=False),
    )
    return check_mixer(raw, "mamba_num_heads", space)


_outer = layout.decoder({"embed": "embeddings", "final_norm": "norm_f", "head": "lm_head"})


def _sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors. Files number blocks: a layer has two of these where it mixes and has a feed-forward."""
    found, hidden, stored = _outer(config), config.hidden_size, 0
    for number, layer in enumerate(config.layers):
        block, mixer = f"blocks.{number}.", f"layers.{stored}."
        if layer.mixes:
            found[f"{block}attn_norm.weight"] = Source(((f"{mixer}norm.weight", (hidden,)),))
            stored += 1
        if isinstance(layer.recurrence, StateSpace):
            found |= mixer_sources(layer.recurrence, f"{block}memory_", f"{mixer}mixer.", hidden)
        elif layer.num_heads:
            sizes = (("q", layer.q_size), ("k", layer.kv_size), ("v", layer.kv_size))
            parts = [(f"{mixer}mixer.{part}_proj", size) for part, size in sizes]
            found |= layout.linear(f"{block}qkv", parts, hidden, bias=False)
            found |= layout.linear(f"{block}attn_out", [(f"{mixer}mixer.o_proj", hidden)], layer.q_size, bias=False)
        if layer.ffn_size:
            found[f"{block}ffn_norm.weight"] = Source(((f"layers.{stored}.norm.weight", (hidden,)),))
            found |= _of_feed_forward(layer, block, f"layers.{stored}.mixer.", hidden)
            stored += 1
    return layout.in_order(found)


def _of_feed_forward(layer: LayerConfig, block: str, stored: str, hidden: int) -> dict[str, Source]:
    experts, width = layer.experts, layer.ffn_size
    if experts is None:
        return _linears(block, stored, width, hidden)
    found = layout.linear(f"{block}router", [(f"{stored}gate", experts.num)], hidden, bias=False)
    correction = f"{stored}gate.e_score_correction_bias", (experts.num,)
    found[f"{block}router.correction"] = Source((correction,), is_wide=True)
    for e in range(experts.num):
        found |= _linears(f"{block}experts.{e}.", f"{stored}experts.{e}.", width, hidden)
    whole = _linears("", f"{stored}shared_experts.", width * experts.num_shared, hidden)
    for i in range(experts.num_shared):
        name, its = f"{block}experts.{experts.num + i}.", (i * width, (i + 1) * width)
        found[f"{name}ffn_up.weight"] = replace(whole["ffn_up.weight"], row_order=tuple(range(*its)))
        found[f"{name}ffn_down.weight"] = replace(whole["ffn_down.weight"], columns=its)
    return found


def _linears(name: str, stored: str, width: int, hidden: int) -> dict[str, Source]:
    up = layout.linear(f"{name}ffn_up", [(f"{stored}up_proj", width)], hidden, bias=False)
    return up | layout.linear(f"{name}ffn_down", [(f"{stored}down_proj", hidden)], width, bias=False)


NEMOTRON_H = Family(
    "nemotron_h",
    _read,
    _sources,
    prefixes=("model.", "backbone."),
    ignored=r"mtp\..*",
    models="Nemotron-H, Nano 2, Nemotron 3 Nano",
)
