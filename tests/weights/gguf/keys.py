"""The keys of a GGUF file from a config.json, as llama.cpp's conversion writes them."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, RopeScalingType

from tests.weights.gguf.qwen import QWENS, add_states

ARCHITECTURES = {
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_bigcode": MODEL_ARCH.STARCODER,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "bloom": MODEL_ARCH.BLOOM,
    "falcon": MODEL_ARCH.FALCON,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "mpt": MODEL_ARCH.MPT,
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.MISTRAL3,
    "exaone": MODEL_ARCH.EXAONE,
    "internlm2": MODEL_ARCH.INTERNLM2,
    "xverse": MODEL_ARCH.XVERSE,
    "minicpm": MODEL_ARCH.MINICPM,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "apertus": MODEL_ARCH.APERTUS,
    "arcee": MODEL_ARCH.ARCEE,
    "jais2": MODEL_ARCH.JAIS2,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo": MODEL_ARCH.OLMO,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "olmoe": MODEL_ARCH.OLMOE,
    "phi": MODEL_ARCH.PHI2,
    "phi3": MODEL_ARCH.PHI3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "stablelm": MODEL_ARCH.STABLELM,
    "cohere": MODEL_ARCH.COMMAND_R,
    "cohere2": MODEL_ARCH.COHERE2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "granite": MODEL_ARCH.GRANITE,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": MODEL_ARCH.GRANITE_MOE,
    "exaone_moe": MODEL_ARCH.EXAONE_MOE,
    "nemotron": MODEL_ARCH.NEMOTRON,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "glm": MODEL_ARCH.CHATGLM,
    "glm4": MODEL_ARCH.GLM4,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "dots1": MODEL_ARCH.DOTS1,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "gemma": MODEL_ARCH.GEMMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "afmoe": MODEL_ARCH.AFMOE,
    "gemma3n_text": MODEL_ARCH.GEMMA3N,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
    "nemotron_h with experts": MODEL_ARCH.NEMOTRON_H_MOE,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
}
"""By model_type."""
NEWER = {
    "laguna": "laguna",
    "mellum": "mellum",
    "cohere2_moe": "cohere2moe",
    "hy_v3": "hy_v3",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granite_swa",
}
"""The architectures that the released package gguf lacks, by model_type."""
_SIZES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
}
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
_FACTORS = {"attention_multiplier": "attention_scale", "embedding_multiplier": "embedding_scale"} | {
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "clip_qkv": "clamp_kqv",
    "use_parallel_residual": "parallel_residual",
}
_MIXTURE = {
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "num_shared_experts": "expert_shared_count",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "num_shared_expert": "expert_shared_count",
    "num_dense_layers": "leading_dense_block_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "routed_scaling_factor": "expert_weights_scale",
    "moe_routed_scaling_factor": "expert_weights_scale",
    "router_scaling_factor": "expert_weights_scale",
    "route_scale": "expert_weights_scale",
    "route_norm": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_SAYS_WHICH = ("exaone4", "exaone_moe", "olmo3", "mellum", "cohere2_moe", "granite_swa", "granitemoe_swa")
"""The conversion writes which of their layers have windows."""
_WITH_WINDOWS = (
    "gemma2",
    "gemma3_text",
    "phi3",
    "cohere2",
    "gpt_oss",
    "afmoe",
    "laguna",
    "gemma3n_text",
    "gemma4_text",
    *_SAYS_WHICH,
)
_LFM2 = ("lfm2", "lfm2_moe")
_NEMOTRON_H = ("nemotron_h", "nemotron_h with experts")
_OF_SIGMOIDS = ("glm4_moe", "dots1", "exaone_moe", "minimax_m2", "afmoe", "laguna", "cohere2_moe", "hy_v3", "lfm2_moe")


def size_of(config: dict[str, Any], name: str) -> Any:
    """Return a size by Llama's name for it."""
    return next((config[its] for its in (name, *_SIZES.get(name, ())) if config.get(its) is not None), None)


def add_keys(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Add the keys of a config.json."""
    model_type = config["model_type"]
    hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    writer.add_embedding_length(hidden)
    writer.add_block_count(size_of(config, "num_hidden_layers"))
    writer.add_head_count(config.get("num_attention_heads_per_layer") or heads)
    writer.add_context_length(size_of(config, "max_position_embeddings") or hidden)
    if model_type != "qwen3_5_moe_text":
        writer.add_feed_forward_length(size_of(config, "intermediate_size") or 4 * hidden)
    for name in _EPS:
        if config.get(name) is not None or (name == "layer_norm_eps" and model_type in ("mpt", "olmo")):
            is_rms = name == "rms_norm_eps" or model_type in (*_LFM2, *_NEMOTRON_H)
            add = writer.add_layer_norm_rms_eps if is_rms else writer.add_layer_norm_eps
            add(config.get(name, 1e-5))
    for name, key in (_FACTORS | _MIXTURE).items():
        value = config.get(name)
        if isinstance(value, list):
            value = value[0]
        if name in _MIXTURE and model_type == "nemotron_h":
            continue
        if value is not None and not (name == "num_experts" and "moe_num_experts" in config):
            getattr(writer, f"add_{key}")(value)
    if model_type in _OF_SIGMOIDS:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if model_type in ("glm4_moe", "dots1", "exaone_moe", "laguna", "cohere2_moe"):
        writer.add_expert_weights_norm(model_type == "laguna" or config["norm_topk_prob"])
    if model_type in ("gpt_oss", "minimax_m2", "cohere2_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if model_type in ("laguna", "cohere2_moe", "hy_v3"):
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    if model_type in ("granite_swa", "granitemoe_swa"):
        writer.add_array("granite_swa.attention.rope_pattern", [theta > 0 for theta in config["layer_rope_theta"]])
    if model_type in _WITH_WINDOWS and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if model_type in _SAYS_WHICH:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if model_type == "mpt":
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
        if config["attn_config"]["clip_qkv"] is not None:
            writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    if model_type == "gpt_bigcode":
        writer.add_head_count_kv(1)
    if model_type == "gemma4_text":
        _add_gemma4(writer, config)
    elif model_type in _NEMOTRON_H:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    elif model_type not in ("gpt2", "gpt_bigcode", "bloom", "mpt"):
        _add_rotary(writer, config, config.get("head_dim") or hidden // heads)
    if model_type == "gemma3n_text":
        _add_gemma3n(writer, config)
    if model_type in QWENS:
        add_states(writer, config)
    if model_type in _LFM2:
        num_kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([num_kv_heads * (kind != "conv") for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if model_type in ("granitemoehybrid", "falcon_h1", *_NEMOTRON_H):
        _add_mamba(writer, config)


def _add_mamba(writer: GGUFWriter, config: dict[str, Any]) -> None:
    is_nemotron, names = config["model_type"] in _NEMOTRON_H, ("layer_types", "layers_block_type")
    kinds = next((config[name] for name in names if name in config), [])
    if kinds:
        num_kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([num_kv_heads * (kind in ("attention", "full_attention")) for kind in kinds])
    if is_nemotron:
        width = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
        writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_state_size(config["ssm_state_size"])
        writer.add_ssm_group_count(config["n_groups"])
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
        writer.add_ssm_time_step_rank(config["mamba_num_heads"])
        if "moe" in kinds:
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
        return
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _add_gemma3n(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -math.inf for share in shares])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _add_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    own = {int(number): its for number, its in config["per_layer_config"].items()}
    near, num = config["head_dim"], config["num_hidden_layers"]
    far = own[num - 1]["head_dim"]  # the last layer has no window
    num_shared, width = config["num_kv_shared_layers"], config["intermediate_size"]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_key_length(far)
    writer.add_value_length(far)
    writer.add_key_length_swa(near)
    writer.add_value_length_swa(near)
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([width] * (num - num_shared) + [2 * width] * num_shared)
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([own.get(i, {}).get("num_key_value_heads", kv_heads) for i in range(num)])
    if config["enable_moe_block"]:
        writer.add_expert_used_count(config["top_k_experts"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(far)
    writer.add_rope_dimension_count_swa(near)
    num_turned = int(far * rope["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * num_turned + [1e30] * (far // 2 - num_turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _add_rotary(writer: GGUFWriter, config: dict[str, Any], head_size: int) -> None:
    if config["model_type"] == "falcon":
        writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)
    elif "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters", {})
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(config.get("rotary_dim") or int(head_size * factor))
    if "head_dim" in config:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "rope_theta" in local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if "partial_rotary_factor" in local:
        writer.add_rope_dimension_count_swa(int(head_size * local["partial_rotary_factor"]))
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if config["model_type"] == "ministral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if kind == "llama3":
        waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_size, 2) / head_size)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        context = rope["original_max_position_embeddings"]
        smooth = (context / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors = np.where(waves < context / high, 1, np.where(waves > context / low, rope["factor"], between))
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
