"""Qwen3.5, dense and with experts, and Qwen3-Next: most layers keep the states that llama.cpp names as Mamba's.

Of Qwen3.5 value heads that share a key head are not side by side: the first of each key head come first, then the
second ones. They stay so, since blocks of quantized columns hold several heads.
Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gptserve.weights.gguf.architecture import LATE_NORM, LAYER, Architecture
from gptserve.weights.gguf.keys import Fields, Keys

_LINEAR = {
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ssm_a.weight": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Older files of Qwen3-Next have ssm_in, whose rows are in the checkpoint's order, for attn_qkv and attn_gate."""
_MIXTURE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}


def _linear(keys: Keys) -> Fields:
    """Return which layers keep states, and the sizes of these."""
    num_values, width = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if width % num_values:
        raise keys.fault("ssm.inner_size", f"a multiple of ssm.time_step_rank ({num_values})")
    return {
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["linear_attention" if its else "full_attention" for its in _keeps_states(keys)],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": width // num_values,
    }


def _keeps_states(keys: Keys) -> list[bool]:
    name, num = "attention.recurrent_layers", keys.size("block_count")
    kinds = keys.get(name)
    if kinds is None:
        interval = keys.size("full_attention_interval", 4)
        return [(i + 1) % interval > 0 for i in range(keys.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num or not all(type(its) in (bool, int) for its in kinds):
        raise keys.fault(name, f"a list of {num} times true or false")
    return [bool(its) for its in kinds[: keys.num_layers]]


def _tiled(keys: Keys) -> Fields:
    fields = _linear(keys)
    fields["linear_value_heads_are_tiled"] = fields["linear_num_value_heads"] != fields["linear_num_key_heads"]
    return fields


def _experts(keys: Keys) -> Fields:
    keys.only("expert_weights_norm", True, "in all of them")
    keys.only("expert_weights_scale", 1.0, "in all of them")
    width = keys.size("expert_feed_forward_length")
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", width),
        "norm_topk_prob": True,
    }


def _architecture(model_type: str, more: Callable[[Keys], Fields], *, has_experts: bool) -> Architecture:
    return Architecture(
        model_type,
        more,
        layer=LAYER | LATE_NORM | _LINEAR | (_MIXTURE if has_experts else {}),
        experts=_EXPERTS if has_experts else {},
        rows=("ffn_gate_inp_shexp.weight",),
        channels=("ssm_conv1d.weight",),
        adds_one=True,
        has_decays=True,
    )


QWEN: Mapping[str, Architecture] = {
    "qwen35": _architecture("qwen3_5_text", _tiled, has_experts=False),
    "qwen35moe": _architecture("qwen3_5_moe_text", lambda keys: _tiled(keys) | _experts(keys), has_experts=True),
    "qwen3next": _architecture("qwen3_next", lambda keys: _linear(keys) | _experts(keys), has_experts=True),
}
