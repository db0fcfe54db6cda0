"""Gemma 4: what its keys say of each layer, and the names of what no other architecture has.

The 12B's files are of this architecture, too. Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from gptserve.weights.gguf.architecture import LATE_NORM, LAYER, OUTER, Architecture, with_windows
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.rope import rope_in_proportion

_TABLE = "per_layer_token_embd.weight"
_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER = LATE_NORM | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps.weight": "experts.gate_up_proj.first",
    "ffn_up_exps.weight": "experts.gate_up_proj.last",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


def _gemma4(keys: Keys) -> Fields:
    far = keys.size("attention.key_length")
    near = keys.size("attention.key_length_swa", far)
    windows = with_windows(keys, 6)
    slides = [kind == "sliding_attention" for kind in windows["layer_types"]]
    num_shared = keys.count("attention.shared_kv_layers", 0)
    of_layers = {
        str(number): {"head_dim": near if its else far, "num_key_value_heads": num}
        for number, (its, num) in enumerate(zip(slides, keys.sizes("attention.head_count_kv"), strict=True))
    }
    last_own = max((i for i, its in enumerate(slides[: keys.num_layers - num_shared]) if not its), default=0)
    table = keys.header.tensors.get(_TABLE)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "per_layer_config": of_layers,
        "attention_k_eq_v": not keys.has(f"blk.{last_own}.attn_v.weight"),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": _is_double(keys, num_shared),
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 0),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        **windows,
        **_experts(keys),
        **rope_in_proportion(keys, near),
    }


def _is_double(keys: Keys, num_shared: int) -> bool:
    """Return whether the feed-forwards of the layers that share keys are twice as wide as the others."""
    widths = keys.sizes("feed_forward_length")
    is_double = num_shared > 0 and widths[-1] != widths[0]
    if widths != [widths[0]] * (len(widths) - num_shared) + [widths[0] * (1 + is_double)] * num_shared:
        raise keys.fault("feed_forward_length", f"one width, or twice it for the last {num_shared} layers")
    return is_double


def _experts(keys: Keys) -> Fields:
    if not keys.count("expert_count", 0):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": keys.size("expert_count"),
        "top_k_experts": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
    }


GEMMA4: Mapping[str, Architecture] = {
    "gemma4": Architecture(
        "gemma4_text",
        _gemma4,
        outer=OUTER | _INPUTS,
        layer=LAYER | _LAYER,
        has_rotary=False,
        layers_differ=True,
    )
}
