"""The architectures whose layers have one feed-forward: what their keys and names do not have in common with Llama's.

Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gptserve.weights.gguf.architecture import (
    LATE_NORM,
    LAYER,
    LAYER_NORM,
    SINKS,
    Architecture,
    llama,
    silu,
    with_windows,
    with_windows_if_any,
)
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.rope import rope_by_kind, rope_parameters

_NORMS_AROUND = LATE_NORM | {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_OLMO2 = LATE_NORM | {"post_ffw_norm": "post_feedforward_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_PHI2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_PHI2_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
_STABLELM_NORMS = {f"attn_{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GPT2_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_GPT2_EPS = ("layer_norm_epsilon", "attention.layer_norm_epsilon")
_GPT2_OUTER = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM_SIZES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "seq_length",
}
_BLOOM_OUTER = {
    "token_embd": "word_embeddings",
    "token_embd_norm": "word_embeddings_layernorm",
    "output_norm": "ln_f",
    "output": "lm_head",
}
_FUSED = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"} | {
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM = _FUSED | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
_NEOX = _FUSED | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
_NEOX_OUTER = {"token_embd": "embed_in", "output_norm": "final_layer_norm", "output": "embed_out"}
_MPT_SIZES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_MPT_OUTER = {"token_embd": "wte", "output_norm": "norm_f", "output": "lm_head"}
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}


def _mistral3(keys: Keys) -> Fields:
    return silu(keys) | {"sliding_window": None}


def _ministral3(keys: Keys) -> Fields:
    scaling = rope_parameters(keys) | {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    return _mistral3(keys) | {"rope_parameters": scaling}


def _apertus(keys: Keys) -> Fields:
    return {"attention_bias": keys.has_attention_bias, "rope_parameters": rope_parameters(keys)}


def _falcon(keys: Keys) -> Fields:
    is_of_40b, has_both = keys.num_kv_heads > 1, keys.has("blk.0.attn_norm_2.weight")
    norms = {"num_ln_in_parallel_attn": 2 if has_both else 1} if is_of_40b else {}
    return {"activation": "gelu", "multi_query": not is_of_40b, "new_decoder_architecture": is_of_40b, **norms}


def _qwen2(keys: Keys) -> Fields:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(keys: Keys) -> Fields:
    return silu(keys) | {"use_sliding_window": False}


def _gemma(keys: Keys) -> Fields:
    return {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _relu2(keys: Keys) -> Fields:
    return llama(keys) | {"hidden_act": "relu2"}


def _starcoder2(keys: Keys) -> Fields:
    # The window is that of all published ones, of which a file says nothing.
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": 4096}


def _phi3(keys: Keys) -> Fields:
    return {
        "hidden_act": "silu",
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.size(
            "rope.scaling.original_context_length", keys.size("context_length")
        ),
    }


def _scalar(keys: Keys, layers_of_largest: int) -> int:
    """Return what scores are divided by the root of: the head's size, but in the largest Gemmas the share of a head."""
    if keys.num_layers == layers_of_largest:
        return keys.size("embedding_length") // keys.num_heads
    return keys.size("attention.key_length")


def _gemma2(keys: Keys) -> Fields:
    return _gemma(keys) | {
        "query_pre_attn_scalar": _scalar(keys, 46),
        "sliding_window": keys.size("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Fields:
    return _gemma(keys) | {
        "query_pre_attn_scalar": _scalar(keys, 62),
        "sliding_window": keys.size("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "rope_theta": keys.number("rope.freq_base", 1e6),
    }


def _gpt2(keys: Keys) -> Fields:
    return {"activation_function": "gelu_new"}


def _starcoder(keys: Keys) -> Fields:
    keys.only("attention.head_count_kv", 1, "in all published")
    return {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def _bloom(keys: Keys) -> Fields:
    return {"apply_residual_connection_post_layernorm": False}


def _gptneox(keys: Keys) -> Fields:
    return {
        "hidden_act": "gelu",
        "attention_bias": keys.has_attention_bias,
        "use_parallel_residual": keys.flag("use_parallel_residual", default=True),
        "tie_word_embeddings": False,
    }


def _mpt(keys: Keys) -> Fields:
    bias, clip = keys.number("attention.max_alibi_bias"), keys.get("attention.clamp_kqv")
    attention = {"alibi": bias > 0, "alibi_bias_max": int(bias), "clip_qkv": clip or None}
    return {"no_bias": True, "attn_config": attention}


def _phi2(keys: Keys) -> Fields:
    return {"hidden_act": "gelu_new", "qk_layernorm": False}


def _stablelm(keys: Keys) -> Fields:
    # Files say that all are parallel, as their converter took an absent setting for that.
    return {
        "hidden_act": "silu",
        "use_qkv_bias": keys.has_attention_bias,
        "use_parallel_residual": not keys.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _cohere(keys: Keys) -> Fields:
    has_norms = keys.has("blk.0.attn_q_norm.weight")
    return silu(keys) | {"logit_scale": keys.number("logit_scale"), "use_qk_norm": has_norms}


def _cohere2(keys: Keys) -> Fields:
    return silu(keys) | {"logit_scale": keys.number("logit_scale"), **with_windows(keys, 4)}


def _olmo(keys: Keys) -> Fields:
    keys.only("attention.layer_norm_epsilon", 1e-5, "in all")
    return silu(keys) | {"clip_qkv": keys.get("attention.clamp_kqv") or None}


def _olmo3(keys: Keys) -> Fields:
    return silu(keys) | with_windows(keys, 4) | rope_by_kind(keys)


def _exaone4(keys: Keys) -> Fields:
    return silu(keys) | with_windows_if_any(keys, 4)


def granite(keys: Keys) -> Fields:
    """Return the fields of Granite, and of that with experts."""
    hidden = keys.size("embedding_length")
    if keys.num_heads > hidden:
        raise keys.fault("attention.head_count", f"at most embedding_length ({hidden})")
    return silu(keys) | {
        "attention_multiplier": keys.number("attention.scale", (hidden // keys.num_heads) ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def granite_swa(keys: Keys) -> Fields:
    """Return the fields of Granite with windows, and of that with experts."""
    fields = granite(keys) | with_windows(keys, 4, begins_full=True) | {"rope_parameters": rope_parameters(keys)}
    turns, theta = keys.get("attention.rope_pattern"), fields["rope_parameters"]["rope_theta"]
    if turns is None:
        return fields
    if not isinstance(turns, list) or not all(type(entry) in (bool, int) for entry in turns):
        raise keys.fault("attention.rope_pattern", "a list of true or false")
    return fields | {"layer_rope_theta": [theta if entry else 0 for entry in turns]}


def _minicpm(keys: Keys) -> Fields:
    """Return Granite's fields; older files lack the factors, and are of MiniCPM 1 and 2."""
    defaults = {
        "embedding_multiplier": ("embedding_scale", 12.0),
        "residual_multiplier": ("residual_scale", 1.4 / keys.num_layers**0.5),
        "logits_scaling": ("logit_scale", keys.size("embedding_length") / 256),
    }
    return granite(keys) | {name: keys.number(*its) for name, its in defaults.items()}


def _ernie(keys: Keys) -> Fields:
    return {"hidden_act": "silu", "use_bias": keys.has_attention_bias}


def _glm4(keys: Keys) -> Fields:
    keys.only("rope.dimension_sections", None, "files of models that see order rows otherwise")
    return silu(keys)


def _seed_oss(keys: Keys) -> Fields:
    return silu(keys) | {"attention_out_bias": keys.has("blk.0.attn_output.bias")}


_FALCON = Architecture(
    "falcon",
    _falcon,
    {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    _BLOOM_OUTER,
    _BLOOM,
    "h",
    eps=_GPT2_EPS,
    joins_heads=True,
)
DENSE: Mapping[str, Architecture] = {
    "llama": Architecture("llama", llama, pairs_heads=True),
    "exaone": Architecture("llama", llama),
    "internlm2": Architecture("llama", llama, pairs_heads=True),
    "xverse": Architecture("llama", llama, pairs_heads=True),
    "mistral3": Architecture("mistral", _mistral3, pairs_heads=True),
    "mistral3 with temperatures": Architecture("ministral3", _ministral3, has_rotary=False, pairs_heads=True),
    "qwen2": Architecture("qwen2", _qwen2),
    "qwen2vl": Architecture("qwen2", _qwen2),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3vl": Architecture("qwen3", _qwen3),
    "smollm3": Architecture("smollm3", silu, pairs_heads=True),
    "apertus": Architecture(
        "apertus",
        _apertus,
        layer=LAYER | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        numbers={f"xielu.{part}": f"mlp.act_fn.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps")},
        has_rotary=False,
    ),
    "arcee": Architecture("arcee", _relu2, pairs_heads=True),
    "jais2": Architecture("jais2", _relu2, eps=LAYER_NORM),
    "phi2": Architecture("phi", _phi2, outer=_PHI2_OUTER, layer=LAYER | _PHI2, eps=LAYER_NORM),
    "phi3": Architecture("phi3", _phi3, layer=LAYER | _PHI3),
    "olmo": Architecture("olmo", _olmo, eps=None, pairs_heads=True),
    "olmo2": Architecture("olmo2", silu, layer=LAYER | _OLMO2),
    "olmo2 with windows": Architecture("olmo3", _olmo3, layer=LAYER | _OLMO2, has_rotary=False),
    "starcoder2": Architecture(
        "starcoder2",
        _starcoder2,
        layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        eps=("norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    "stablelm": Architecture("stablelm", _stablelm, heads=_STABLELM_NORMS, eps=LAYER_NORM),
    "command-r": Architecture("cohere", _cohere, eps=LAYER_NORM),
    "cohere2": Architecture("cohere2", _cohere2, eps=LAYER_NORM),
    "exaone4": Architecture("exaone4", _exaone4, layer=LAYER | _OLMO2),
    "granite": Architecture("granite", granite, pairs_heads=True),
    "granite_swa": Architecture("granite_swa", granite_swa, layer=LAYER | SINKS, has_rotary=False, pairs_heads=True),
    "minicpm": Architecture("granite", _minicpm, pairs_heads=True),
    "nemotron": Architecture("nemotron", _relu2, eps=("norm_eps", "attention.layer_norm_epsilon"), adds_one=True),
    "ernie4_5": Architecture("ernie4_5", _ernie),
    "chatglm": Architecture("glm", silu, layer=LAYER | {"ffn_up": "mlp.gate_up_proj"}),
    "glm4": Architecture("glm4", _glm4, layer=LAYER | _GLM4),
    "seed_oss": Architecture("seed_oss", _seed_oss, layer=LAYER | LATE_NORM),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", silu, layer=LAYER | _HEAD_NORMS),
    "gemma": Architecture("gemma", _gemma, adds_one=True),
    "gemma2": Architecture("gemma2", _gemma2, layer=LAYER | _NORMS_AROUND, adds_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, layer=LAYER | _NORMS_AROUND, adds_one=True),
    "gpt2": Architecture("gpt2", _gpt2, _GPT2_SIZES, _GPT2_OUTER, _GPT2, "h", eps=_GPT2_EPS, has_rotary=False),
    "starcoder": Architecture(
        "gpt_bigcode", _starcoder, _GPT2_SIZES, _GPT2_OUTER, _GPT2, "h", eps=_GPT2_EPS, has_rotary=False
    ),
    "gptneox": Architecture(
        "gpt_neox", _gptneox, outer=_NEOX_OUTER, layer=_NEOX, layers="layers", eps=LAYER_NORM, joins_heads=True
    ),
    "bloom": Architecture(
        "bloom",
        _bloom,
        _BLOOM_SIZES,
        _BLOOM_OUTER,
        _BLOOM,
        "h",
        eps=_GPT2_EPS,
        has_rotary=False,
        joins_heads=True,
    ),
    "falcon": _FALCON,
    "falcon with norms": replace(_FALCON, layer=_BLOOM | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}),
    "mpt": Architecture("mpt", _mpt, _MPT_SIZES, _MPT_OUTER, _MPT, "blocks", eps=_GPT2_EPS, has_rotary=False),
}
