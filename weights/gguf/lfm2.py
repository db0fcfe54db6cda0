"""LFM2, dense and with experts: layers without heads of keys have convolutions, whose names no other architecture has.

Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gptserve.weights.gguf.architecture import LAYER, OUTER, Architecture
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.mixtures import SIGMOID

_NORM = "model.embedding_norm"
_OUTER = OUTER | {"token_embd_norm": _NORM, "output_norm": _NORM}
"""Files have the first name for the last norm; llama.cpp takes it for a wrong one."""
_FFN = {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"}
_LAYER = LAYER | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **_FFN,
}
_EXPERTS = {f"{name}_exps": its.replace(".", ".experts.{}.") for name, its in _FFN.items()}


def _layers(keys: Keys) -> Fields:
    kinds = ["full_attention"] * keys.num_layers
    if isinstance(keys.get("attention.head_count_kv"), list):
        kinds = ["full_attention" if its else "conv" for its in keys.kv_heads_of_layers]
    return {"layer_types": kinds, "conv_L_cache": keys.size("shortconv.l_cache")}


def _lfm2(keys: Keys) -> Fields:
    return _layers(keys) | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(keys: Keys) -> Fields:
    keys.only("expert_gating_func", SIGMOID, "in all of them")
    return {
        **_layers(keys),
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.count("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "use_expert_bias": any(".exp_probs_b" in name for name in keys.header.tensors),
    }


def _architecture(model_type: str, more: Callable[[Keys], Fields], experts: Mapping[str, str]) -> Architecture:
    return Architecture(
        model_type,
        more,
        outer=_OUTER,
        layer=_LAYER,
        experts=experts,
        channels=("shortconv.conv.weight",),
        eps=("norm_eps", "attention.layer_norm_rms_epsilon"),
        layers_differ=True,
    )


LFM2: Mapping[str, Architecture] = {
    "lfm2": _architecture("lfm2", _lfm2, {}),
    "lfm2moe": _architecture("lfm2_moe", _lfm2_moe, _EXPERTS),
}
