"""The architectures whose layers have experts: what their keys and names do not have in common with Llama's.

Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from gptserve.weights.gguf.architecture import (
    LATE_NORM,
    LAYER,
    LAYER_NORM,
    SINKS,
    Architecture,
    silu,
    with_windows,
    with_windows_if_any,
)
from gptserve.weights.gguf.dense import granite, granite_swa
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.rope import rope_by_kind, rope_fields

SIGMOID = 2
"""The number of a router's function in files."""


def _names(part: str, router: str, kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Fields:
    """Return the names of the router and of the experts, as arguments of Architecture."""
    stored = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    experts = {name: f"{part}.experts.{{}}.{kind}" for name, kind in zip(stored, kinds, strict=True)}
    return {"layer": LAYER | {"ffn_gate_inp": f"{part}.{router}"}, "experts": experts}


def _shared(part: str) -> dict[str, str]:
    """Return the names of the shared experts."""
    return {f"ffn_{kind}_shexp": f"mlp.{part}.{kind}_proj" for kind in ("gate", "up", "down")}


def _num(keys: Keys, name: str) -> Fields:
    """Return how many experts a layer has, under this name of config.json, and how many a token chooses."""
    return {name: keys.size("expert_count"), "num_experts_per_tok": keys.size("expert_used_count")}


def _width(keys: Keys, *, is_of_all: bool = False) -> int:
    """Return the width of an expert; for an older file that of all that a token chooses may stand there."""
    width = keys.size("feed_forward_length")
    return keys.size("expert_feed_forward_length", width // keys.size("expert_used_count") if is_of_all else width)


def _mixtral(keys: Keys) -> Fields:
    return {"hidden_act": "silu", **_num(keys, "num_local_experts")}


def _qwen2_moe(keys: Keys) -> Fields:
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "qkv_bias": keys.has_attention_bias,
        **_num(keys, "num_experts"),
        "moe_intermediate_size": _width(keys, is_of_all=True),
        "shared_expert_intermediate_size": keys.size(
            "expert_shared_feed_forward_length", keys.size("feed_forward_length")
        ),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
    }


def _qwen3_moe(keys: Keys) -> Fields:
    return silu(keys) | {
        "use_sliding_window": False,
        **_num(keys, "num_experts"),
        "moe_intermediate_size": _width(keys, is_of_all=True),
        "norm_topk_prob": True,
    }


def _olmoe(keys: Keys) -> Fields:
    return silu(keys) | _num(keys, "num_experts") | {"norm_topk_prob": False}


def _granite_moe(keys: Keys) -> Fields:
    return granite(keys) | _num(keys, "num_local_experts")


def _granite_shared(keys: Keys) -> Fields:
    return _granite_moe(keys) | {"shared_intermediate_size": keys.size("expert_shared_feed_forward_length")}


def _granite_moe_swa(keys: Keys) -> Fields:
    width = keys.count("expert_shared_feed_forward_length", 0)
    return granite_swa(keys) | _num(keys, "num_local_experts") | {"shared_intermediate_size": width}


def _deepseek(keys: Keys) -> Fields:
    """Return the fields of mixtures with corrected sigmoids."""
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    return silu(keys) | {
        **_num(keys, "n_routed_experts"),
        "moe_intermediate_size": _width(keys),
        "n_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
    }


def _exaone_moe(keys: Keys) -> Fields:
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    return {renamed.get(name, name): value for name, value in _deepseek(keys).items()} | with_windows(keys, 4)


def _glm4_moe(keys: Keys) -> Fields:
    return _deepseek(keys) | {"use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


def _dots(keys: Keys) -> Fields:
    return _deepseek(keys) | {"sliding_window": None}


def _ernie_moe(keys: Keys) -> Fields:
    return {
        "hidden_act": "silu",
        "use_bias": keys.has_attention_bias,
        "moe_num_experts": keys.size("expert_count"),
        "moe_k": keys.size("expert_used_count"),
        "moe_intermediate_size": _width(keys),
        "moe_num_shared_experts": keys.count("expert_shared_count", 0),
        "moe_layer_start_index": keys.count("leading_dense_block_count", 0),
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
    }


def _afmoe(keys: Keys) -> Fields:
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    return {
        **silu(keys),
        **_num(keys, "num_experts"),
        "moe_intermediate_size": _width(keys),
        "num_shared_experts": keys.count("expert_shared_count", 0),
        "num_dense_layers": keys.count("leading_dense_block_count", 0),
        "route_scale": keys.number("expert_weights_scale", 1.0),
        "route_norm": keys.flag("expert_weights_norm", default=True),
        "mup_enabled": True,
        **with_windows(keys, 4),
    }


def _laguna(keys: Keys) -> Fields:
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    keys.only("expert_weights_norm", True, "in all of them")
    gate = keys.header.tensors.get("blk.0.attn_gate.weight")
    return {
        **silu(keys),
        **_num(keys, "num_experts"),
        "moe_intermediate_size": _width(keys),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "mlp_layer_types": _kinds(keys),
        "gating": "per-head" if gate is None or gate.shape[0] == keys.num_heads else "per-element",
        **with_windows_if_any(keys, 4, begins_full=True),
        **rope_by_kind(keys),
    }


def _kinds(keys: Keys) -> list[str]:
    """Return which layers have experts."""
    num_dense = min(keys.count("leading_dense_block_count", 0), keys.num_layers)
    return ["dense"] * num_dense + ["sparse"] * (keys.num_layers - num_dense)


def _mellum(keys: Keys) -> Fields:
    return {
        **silu(keys),
        **_num(keys, "num_experts"),
        "moe_intermediate_size": _width(keys, is_of_all=True),
        "norm_topk_prob": True,
        **with_windows_if_any(keys, 4),
        **rope_by_kind(keys),
    }


def _cohere2_moe(keys: Keys) -> Fields:
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    num_dense, is_rms = keys.count("leading_dense_block_count", 0), keys.get("attention.layer_norm_rms_epsilon")
    norm = ("rms_norm_eps", "attention.layer_norm_rms_epsilon") if is_rms else LAYER_NORM
    fields = {
        **silu(keys),
        norm[0]: keys.number(norm[1]),
        "logit_scale": keys.number("logit_scale"),
        **_num(keys, "num_experts"),
        "intermediate_size": _width(keys),
        "num_shared_experts": keys.count("expert_shared_count", 0),
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
        "first_k_dense_replace": num_dense,
        **with_windows(keys, 4, begins_full=True),
    }
    if num_dense:  # feed_forward_length is the width of an expert
        up = keys.header.tensors.get("blk.0.ffn_up.weight")
        fields["prefix_dense_intermediate_size"] = keys.size("feed_forward_length") if up is None else up.shape[0]
    return fields


def _hy_v3(keys: Keys) -> Fields:
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    return {
        **silu(keys),
        **_num(keys, "num_experts"),
        "moe_intermediate_size": _width(keys),
        "num_shared_experts": keys.size("expert_shared_count", 1),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "route_norm": keys.flag("expert_weights_norm", default=True),
    }


def _minimax(keys: Keys) -> Fields:
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    return {
        "hidden_act": "silu",
        **_num(keys, "num_local_experts"),
        "intermediate_size": _width(keys),
    }


def _hunyuan_moe(keys: Keys) -> Fields:
    return silu(keys) | {
        **_num(keys, "num_experts"),
        "num_shared_expert": keys.size("expert_shared_count", 1),
        "moe_intermediate_size": _width(keys),
    }


def _gpt_oss(keys: Keys) -> Fields:
    return {
        "hidden_act": "silu",
        "attention_bias": True,
        **_num(keys, "num_local_experts"),
        "intermediate_size": _width(keys),
        **with_windows(keys, 2),
        **_untruncated(rope_fields(keys)),
    }


def _untruncated(fields: Fields) -> Fields:
    """Return the fields with YaRN as gpt-oss has it: its ramp begins and ends between dimensions."""
    scaling = fields.get("rope_scaling")
    return {} if scaling is None else {"rope_scaling": scaling | {"truncate": False}}


_W = ("w1", "w3", "w2")
_QWEN = _names("mlp", "gate")
_QWEN3 = Architecture("qwen3_moe", _qwen3_moe, **_QWEN)
_CORRECTED = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"} | _shared("shared_experts")
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_HUNYUAN |= _shared("shared_mlp")
_AFMOE = {
    **LATE_NORM,
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
    "exp_probs_b.bias": "mlp.expert_bias",
    **_shared("shared_experts"),
}
_LAGUNA = {
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
    **_shared("shared_expert"),
}
_HY_V3 = {"exp_probs_b.bias": "mlp.expert_bias", **_shared("shared_mlp")}
_GPT_OSS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj.even",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj.odd",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias.even",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias.odd",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight.first",
    "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight.last",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
GRANITE_SHARED = _GRANITE | {
    "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight.first",
    "ffn_up_shexp.weight": "shared_mlp.input_linear.weight.last",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE_SWA = SINKS | {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.gate_up_proj.first",
    "ffn_up_exps.weight": "block_sparse_moe.experts.gate_up_proj.last",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
"""Of gates and ups that are one tensor in the checkpoint, quantized/gguf.py knows the endings."""


def _with(names: Fields, more: Mapping[str, str]) -> Fields:
    return names | {"layer": names["layer"] | more}


MIXTURES: Mapping[str, Architecture] = {
    "llama with experts": Architecture("mixtral", _mixtral, pairs_heads=True, **_names("block_sparse_moe", "gate", _W)),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _qwen2_moe,
        rows=("ffn_gate_inp_shexp.weight",),
        **_with(_QWEN, _shared("shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}),
    ),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,
    "olmoe": Architecture("olmoe", _olmoe, **_QWEN),
    "granitemoe": Architecture("granitemoe", _granite_moe, layer=LAYER | _GRANITE, pairs_heads=True),
    "granitemoe with shared experts": Architecture(
        "granitemoeshared", _granite_shared, layer=LAYER | GRANITE_SHARED, pairs_heads=True
    ),
    "granite_swa with experts": Architecture(
        "granitemoe_swa", _granite_moe_swa, layer=LAYER | _GRANITE_SWA, has_rotary=False, pairs_heads=True
    ),
    "exaone-moe": Architecture(
        "exaone_moe", _exaone_moe, **_with(_QWEN, _CORRECTED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"})
    ),
    "glm4moe": Architecture("glm4_moe", _glm4_moe, **_with(_QWEN, LATE_NORM | _CORRECTED)),
    "dots1": Architecture("dots1", _dots, **_with(_QWEN, _CORRECTED)),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        _ernie_moe,
        rows=("exp_probs_b.bias",),
        **_with(_QWEN, _CORRECTED | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}),
    ),
    "afmoe": Architecture("afmoe", _afmoe, **_with(_names("mlp", "router.gate"), _AFMOE)),
    "laguna": Architecture("laguna", _laguna, has_rotary=False, **_with(_QWEN, _LAGUNA)),
    "mellum": Architecture("mellum", _mellum, has_rotary=False, **_QWEN),
    "cohere2moe": Architecture("cohere2_moe", _cohere2_moe, eps=None, **_with(_QWEN, _shared("shared_experts"))),
    "hy_v3": Architecture("hy_v3", _hy_v3, **_with(_names("mlp", "router.gate"), _HY_V3)),
    "minimax-m2": Architecture(
        "minimax_m2",
        _minimax,
        **_with(
            _names("block_sparse_moe", "gate", _W),
            {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        ),
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _hunyuan_moe, **_with(_names("mlp", "gate.wg"), _HUNYUAN)),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, layer=LAYER | LATE_NORM | SINKS | _GPT_OSS),
}
