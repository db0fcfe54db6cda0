"""Tiny shapes of every family: what transformers is asked to write, with each choice its configuration allows."""

from __future__ import annotations

from typing import Any

# Names of the sizes differ between families; vocabulary, layers, heads and so on are small in all.
_GPT2 = {"vocab_size": 96, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
_LLAMA = {
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_DEEP = {**_LLAMA, "num_hidden_layers": 4}
_GLM_MOE = {
    **_LLAMA,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_GRANITE = {
    **_LLAMA,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
_GRANITE_HYBRID = {
    **_GRANITE,
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 4,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.0, 9.0],
}
_NEMOTRON_H = {
    **{name: value for name, value in _LLAMA.items() if name != "num_hidden_layers"},
    "head_dim": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 16,
    "time_step_limit": [0.0, 9.0],
}
_FALCON_H1 = {
    **_LLAMA,
    "head_dim": 24,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.0, 9.0],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.4],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.7, 1.5, 0.8, 1.2, 0.6],
}
_SWASH = {**_GRANITE, "num_hidden_layers": 4, "sliding_window": 11, "layer_rope_theta": [1e4, 5e5, 0, 1e4]}
_NEO = {"vocab_size": 96, "max_position_embeddings": 128, "hidden_size": 64, "num_layers": 4, "num_heads": 4}
_NEOX = {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}
_OPT = {
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "pad_token_id": 1,
}
_BLOOM = {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 128}
_MPT = {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
_XGLM = {
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "d_model": 64,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_dim": 96,
}
_GEMMA = {**_LLAMA, "head_dim": 24, "query_pre_attn_scalar": 32, "num_hidden_layers": 4, "sliding_window": 12}
_GEMMA4 = {
    **_LLAMA,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "head_dim": 16,
    "global_head_dim": 32,
    "pad_token_id": 0,
}
_GEMMA4_DENSE = {**_GEMMA4, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
_LFM2 = {**_DEEP, "full_attn_idxs": [1, 3], "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.3}
_LFM3 = {**_DEEP, "sliding_window": 12, "pad_token_id": None}
_LFM2_MOE = {
    **_DEEP,
    "layer_types": ["conv", "full_attention"] * 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "routed_scaling_factor": 2.5,
}
_QWEN3_5 = {
    **_DEEP,
    "rms_norm_eps": 1e-3,  # smaller ones enlarge rounding where heads give next to nothing
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
_QUARTER = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}}
_QWEN3_5_MOE = {
    **{name: value for name, value in _QWEN3_5.items() if name != "intermediate_size"},
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_GEMMA4_SMALL = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA3N = {
    **_LLAMA,
    "intermediate_size": [96, 96, 128, 96, 64, 128],
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "head_dim": 16,
    "pad_token_id": 0,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 80,
    "num_kv_shared_layers": 3,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.75, 0.5, 0.0, 0.0, 0.95, 0.0],
    "final_logit_softcapping": 3.0,
}
_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}

_ROPE_MINISTRAL3 = {
    **_ROPE_YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_FALCON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROPE_ALPHA = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 30.0, "factor": 1.0}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_SEEING = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_GEMMA4S_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
_CLIP = {**_SEEING, "model_type": "clip_vision_model", "projection_dim": 32}
_LFM2_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 16,
}
_QWENS_EYES = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}


def _with_vision(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    return {"text_config": {**ends, "initializer_range": 0.2, **text}, "vision_config": vision}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-1": ("openai-gpt", _GPT2),
    "GPT-1, untied": ("openai-gpt", {**_GPT2, "tie_word_embeddings": False}),
    "GPT-2": ("gpt2", _GPT2),
    "GPT-2, one layer of one head": ("gpt2", {**_GPT2, "n_layer": 1, "n_head": 1, "n_embd": 16}),
    "GPT-2, head size 24, wide ffn": ("gpt2", {**_GPT2, "n_layer": 3, "n_head": 2, "n_embd": 48, "n_inner": 200}),
    "GPT-2, scaled by layer": (
        "gpt2",
        {**_GPT2, "n_layer": 4, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "GPT-2, unscaled, relu": (
        "gpt2",
        {**_GPT2, "scale_attn_weights": False, "activation_function": "relu", "initializer_range": 0.1},
    ),
    "GPT-2, exact gelu, untied": ("gpt2", {**_GPT2, "activation_function": "gelu", "tie_word_embeddings": False}),
    "GPT-2, silu, odd eps": (
        "gpt2",
        {**_GPT2, "activation_function": "silu", "layer_norm_epsilon": 1e-3, "n_positions": 77},
    ),
    "GPT-2, tanh": ("gpt2", {**_GPT2, "activation_function": "tanh"}),
    "GPT-2, quick gelu": ("gpt2", {**_GPT2, "activation_function": "quick_gelu"}),
    "GPT-Neo, past its window": ("gpt_neo", {**_NEO, "attention_types": [[["global", "local"], 2]], "window_size": 9}),
    "GPT-J": ("gptj", {**_GPT2, "rotary_dim": 8}),
    "GPT-NeoX": ("gpt_neox", _NEOX),
    "GPT-NeoX, sequential, all rotary, no bias": (
        "gpt_neox",
        {**_NEOX, "use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "GPTBigCode, one KV head": ("gpt_bigcode", _GPT2),
    "GPTBigCode, many KV heads": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "CodeGen": ("codegen", {**_GPT2, "rotary_dim": 8}),
    "CodeGen, eight heads, wide ffn": ("codegen", {**_GPT2, "n_head": 8, "rotary_dim": 4, "n_inner": 96}),
    "Falcon 7B": ("falcon", _FALCON),
    "Falcon 11B": (
        "falcon",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "tie_word_embeddings": False,
        },
    ),
    "Falcon 40B": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "Falcon RW": ("falcon", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "Persimmon": ("persimmon", _NEOX),
    "Persimmon without norms of heads": ("persimmon", {**_NEOX, "qk_layernorm": False}),
    "OPT": ("opt", _OPT),
    "OPT 350M's layout": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "OPT without biases": ("opt", {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "BLOOM": ("bloom", _BLOOM),
    "BLOOM, six heads": ("bloom", {**_BLOOM, "hidden_size": 96, "n_head": 6}),
    "MPT": ("mpt", _MPT),
    "MPT, untied": ("mpt", {**_MPT, "tie_word_embeddings": False}),
    "MPT, six heads, clipped": (
        "mpt",
        {**_MPT, "d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 0.5}},
    ),
    "XGLM": ("xglm", _XGLM),
    "Llama": ("llama", _LLAMA),
    "Llama, biases, own head size, tied": (
        "llama",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "Llama 3.1, past its first context": ("llama", {**_LLAMA, "rope_parameters": _ROPE_LLAMA3}),
    "Llama, linear scaling": (
        "llama",
        {**_LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "Mistral, past its window": ("mistral", {**_LLAMA, "sliding_window": 11, "head_dim": 24}),
    "Mistral without a window": ("mistral", {**_LLAMA, "sliding_window": None}),
    "Qwen2": ("qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "Qwen2, windows from layer 1": (
        "qwen2",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "Qwen2, YaRN, past its first context": ("qwen2", {**_LLAMA, "rope_parameters": _ROPE_YARN}),
    "Qwen3": ("qwen3", {**_LLAMA, "head_dim": 24}),
    "Phi": ("phi", {**_LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "Phi-3, past its window": ("phi3", {**_LLAMA, "sliding_window": 10, "pad_token_id": 0}),
    "Phi-3, LongRoPE": (
        "phi3",
        {
            **_LLAMA,
            "pad_token_id": 0,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
                "long_factor": [4.0] * 8,
            },
        },
    ),
    "Gemma 2, past its window": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "VaultGemma, past its window": (
        "vaultgemma",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma 3, past its window": (
        "gemma3_text",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "Gemma 3, logits capped": ("gemma3_text", {**_GEMMA, "final_logit_softcapping": 3.0}),
    "Gemma 3n, past its window": ("gemma3n_text", _GEMMA3N),
    "Gemma 3n, two streams, all gates and keys": (
        "gemma3n_text",
        {
            **_GEMMA3N,
            "num_hidden_layers": 3,
            "layer_types": None,
            "intermediate_size": 96,
            "activation_sparsity_pattern": None,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "attention_bias": True,
        },
    ),
    "Gemma 4, past its window": (
        "gemma4_text",
        {**_GEMMA4_DENSE, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "Gemma 4, a window on all but the last layer": (
        "gemma4_text",
        {**_GEMMA4_DENSE, "layer_types": ["sliding_attention"] * 4, "attention_bias": True, "attention_k_eq_v": True},
    ),
    "Gemma 4 with experts": (
        "gemma4_text",
        {
            **_GEMMA4_DENSE,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "Gemma 4, inputs of layers and shared keys": ("gemma4_text", _GEMMA4_SMALL),
    "Gemma 4 12B": (
        "gemma4_unified_text",
        {
            **{name: value for name, value in _GEMMA4_DENSE.items() if "per_layer" not in name},
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gpt-oss, past its window": (
        "gpt_oss",
        {
            **_LLAMA,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "swiglu_limit": 2.0,
            "rope_parameters": {**_ROPE_YARN, "truncate": False},
        },
    ),
    "Mixtral, past its window": (
        "mixtral",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "Qwen3 MoE, layer 1 dense": (
        "qwen3_moe",
        {
            **_LLAMA,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3 MoE, weights of all": (
        "qwen3_moe",
        {**_LLAMA, "head_dim": 24, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "OLMoE": ("olmoe", {**_LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "Granite MoE": (
        "granitemoe",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Granite with shared experts": (
        "granitemoeshared",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 192},
    ),
    "Granite Swash with experts, past its window": (
        "granitemoe_swa",
        {**_SWASH, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "Qwen2 MoE": (
        "qwen2_moe",
        {
            **_LLAMA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [0],
        },
    ),
    "Qwen2 MoE, past its windows": (
        "qwen2_moe",
        {
            **_DEEP,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 3,
        },
    ),
    "GLM 4.5": ("glm4_moe", _GLM_MOE),
    "GLM 4.5, in groups": ("glm4_moe", {**_GLM_MOE, "use_qk_norm": True, "n_group": 4, "topk_group": 2}),
    "dots.llm1": (
        "dots1",
        {**_GLM_MOE, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "sliding_window": 12, "max_window_layers": 1},
    ),
    "Solar Open": (
        "solar_open",
        {**_GLM_MOE, "head_dim": 24, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "K-EXAONE, past its window": (
        "exaone_moe",
        {
            **_DEEP,
            "sliding_window": 11,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
        },
    ),
    "K-EXAONE, dense in the middle": (
        "exaone_moe",
        {
            **_DEEP,
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "Hy3": (
        "hy_v3",
        {
            **_LLAMA,
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
        },
    ),
    "Trinity, past its window": (
        "afmoe",
        {
            **_DEEP,
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "sliding_window": 11,
            "route_scale": 1.7,
            "mup_enabled": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "Laguna, gates of heads": (
        "laguna",
        {
            **_DEEP,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "moe_routed_scaling_factor": 1.7,
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_attention_heads_per_layer": [4, 6, 4, 2],
        },
    ),
    "Laguna, gates of dimensions": (
        "laguna",
        {
            **_LLAMA,
            "head_dim": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "gating": "per-element",
        },
    ),
    "Qwen3.5": ("qwen3_5_text", _QWEN3_5),
    "Qwen3.5, attention first, tied": (
        "qwen3_5_text",
        {
            **_DEEP,
            "rms_norm_eps": 1e-3,  # smaller ones enlarge rounding where heads give next to nothing
            "tie_word_embeddings": True,
            "head_dim": 16,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 40,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["full_attention", "linear_attention"] * 2,
        },
    ),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", _QWEN3_5_MOE),
    "Qwen3-Next": (
        "qwen3_next",
        {**_QWEN3_5_MOE, "intermediate_size": 96, **_QUARTER},
    ),
    "Qwen3-Next, a dense layer, weights of all": (
        "qwen3_next",
        {
            **_QWEN3_5_MOE,
            "intermediate_size": 96,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 32,
            **_QUARTER,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "Mellum 2, past its window": (
        "mellum",
        {
            **_DEEP,
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "rope_parameters": {
                "full_attention": {**_ROPE_YARN, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "Flint, past its window": (
        "flint",
        {
            **_DEEP,
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "sliding_window": 11,
        },
    ),
    "FlexOlmo": ("flex_olmo", {**_LLAMA, "num_experts": 5, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "ERNIE 4.5 MoE": (
        "ernie4_5_moe",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_layer_end_index": 1,
        },
    ),
    "MiniMax M2": (
        "minimax_m2",
        {**_LLAMA, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 12},
    ),
    "Hunyuan": ("hunyuan_v1_dense", {**_LLAMA, "head_dim": 24, "rope_parameters": _ROPE_ALPHA}),
    "Hunyuan MoE": ("hunyuan_v1_moe", {**_LLAMA, "head_dim": 16, "num_experts": 5, "moe_topk": [1, 3]}),
    "nanochat": ("nanochat", {**_LLAMA, "final_logit_softcapping": 4.0, "pad_token_id": 0}),
    "OLMo 2": ("olmo2", {**_LLAMA, "pad_token_id": 0}),
    "OLMo, clipped": ("olmo", {**_LLAMA, "pad_token_id": 0, "clip_qkv": 1.5}),
    "OLMo 3, past its window": ("olmo3", {**_DEEP, "pad_token_id": 0, "sliding_window": 11}),
    "OLMo 3, YaRN on some layers": (
        "olmo3",
        {
            **_DEEP,
            "pad_token_id": 0,
            "sliding_window": 11,
            "rope_parameters": {"full_attention": _ROPE_YARN, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "Ministral, past its window": (
        "ministral",
        {**_DEEP, "head_dim": 16, "sliding_window": 11, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "Ministral 3, YaRN": ("ministral3", {**_LLAMA, "head_dim": 24, "rope_parameters": _ROPE_MINISTRAL3}),
    "Ministral 3 without factors of queries": (
        "ministral3",
        {
            **_LLAMA,
            "head_dim": 16,
            "rope_parameters": {**_ROPE_YARN, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0},
        },
    ),
    "Gemma": ("gemma", {**_LLAMA, "head_dim": 24, "pad_token_id": 0, "initializer_range": 0.1}),
    "SmolLM3": ("smollm3", {**_DEEP, "pad_token_id": 0}),
    "SmolLM3, windows where no positions are": (
        "smollm3",
        {**_DEEP, "pad_token_id": 0, "use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2},
    ),
    "EXAONE 3": ("exaone", {**_LLAMA, "head_dim": 24}),
    "EXAONE 3.5, past its first context": (
        "exaone",
        {**_LLAMA, "head_dim": 16, "rope_parameters": _ROPE_LLAMA3, "tie_word_embeddings": True},
    ),
    "EXAONE 4, past its window": ("exaone4", {**_DEEP, "sliding_window": 11}),
    "EXAONE 4 without a window": ("exaone4", {**_LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "GLM 4": ("glm", {**_LLAMA, "head_dim": 16, "pad_token_id": 0, "eos_token_id": [1]}),
    "GLM 4 of 2025": ("glm4", {**_LLAMA, "head_dim": 16, "pad_token_id": 0, "eos_token_id": [1]}),
    "CWM, past its window": (
        "cwm",
        {**_DEEP, "head_dim": 16, "sliding_window": 11, "bos_token_id": 0, "eos_token_id": [1]},
    ),
    "Seed-OSS": ("seed_oss", {**_LLAMA, "head_dim": 24, "pad_token_id": 0}),
    "Apertus": ("apertus", {**_LLAMA, "pad_token_id": 0}),
    "Arcee": ("arcee", {**_LLAMA, "head_dim": 16, "pad_token_id": 0}),
    "ERNIE 4.5": ("ernie4_5", {**_LLAMA, "head_dim": 24, "pad_token_id": 0}),
    "ERNIE 4.5 with biases": ("ernie4_5", {**_LLAMA, "head_dim": 16, "pad_token_id": 0, "use_bias": True}),
    "Helium": ("helium", {**_LLAMA, "head_dim": 16, "pad_token_id": 0}),
    "StarCoder2, past its window": ("starcoder2", {**_LLAMA, "sliding_window": 11}),
    "StableLM": ("stablelm", {**_LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "StableLM, parallel, biases": (
        "stablelm",
        {**_LLAMA, "use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
    ),
    "StableLM 2 12B": ("stablelm", {**_LLAMA, "use_parallel_residual": True, "qk_layernorm": True}),
    "Gemma 3 that sees, past its window": (
        "gemma3",
        {
            **_with_vision(
                {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0}, _SEEING
            ),
            "mm_tokens_per_image": 4,
        },
    ),
    "Gemma 3n that sees and hears": (
        "gemma3n",
        {
            **_with_vision(_GEMMA3N, {"hidden_size": 32}),
            "audio_config": {
                "hidden_size": 32,
                "conf_num_hidden_layers": 1,
                "conf_num_attention_heads": 2,
                "sscp_conv_channel_size": [4, 2],
            },
        },
    ),
    "Gemma 4 that sees, inputs of layers and shared keys": (
        "gemma4",
        {
            **_with_vision(_GEMMA4_SMALL, _GEMMA4S_EYES),
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [4, 2],
                "output_proj_dims": 32,
            },
        },
    ),
    "Gemma 4 12B that sees": (
        "gemma4_unified",
        {
            **_with_vision(
                {
                    **{name: value for name, value in _GEMMA4_DENSE.items() if "per_layer" not in name},
                    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1,
                },
                {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 64, "mm_posemb_size": 8},
            ),
            "audio_config": {"audio_embed_dim": 16},
        },
    ),
    "Command A that sees": (
        "cohere2_vision",
        _with_vision(
            {**_DEEP, "model_type": "cohere2", "head_dim": 16, "pad_token_id": 0, "logit_scale": 1.0},
            {**_SEEING, "model_type": "siglip_vision_model"},
        ),
    ),
    "Command A+ that sees": (
        "cohere2_vision",
        _with_vision(
            {
                **_LLAMA,
                "model_type": "cohere2_moe",
                "head_dim": 16,
                "pad_token_id": 0,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "num_shared_experts": 2,
                "logit_scale": 1.0,
            },
            {**_SEEING, "model_type": "siglip_vision_model"},
        ),
    ),
    "LLaVA": ("llava", _with_vision({**_LLAMA, "model_type": "llama"}, _CLIP)),
    "LLaVA, Pixtral's text, past its window": (
        "llava",
        _with_vision({**_LLAMA, "model_type": "mistral", "head_dim": 24, "sliding_window": 11}, _CLIP),
    ),
    "LLaVA 1.6, Qwen2's text": ("llava_next", _with_vision({**_LLAMA, "model_type": "qwen2"}, _CLIP)),
    "LLaVA-OneVision": (
        "llava_onevision",
        {
            **_with_vision({**_LLAMA, "model_type": "qwen2"}, {**_SEEING, "model_type": "siglip_vision_model"}),
            "tie_word_embeddings": True,
        },
    ),
    "SmolVLM": ("smolvlm", _with_vision({**_LLAMA, "model_type": "llama", "pad_token_id": 0}, _SEEING)),
    "Idefics 3": ("idefics3", _with_vision({**_LLAMA, "model_type": "llama", "pad_token_id": 0}, _SEEING)),
    "InternVL 3": ("internvl", _with_vision({**_LLAMA, "model_type": "qwen2"}, _SEEING)),
    "InternVL 3.5": (
        "internvl",
        {**_with_vision({**_LLAMA, "model_type": "qwen3", "head_dim": 24}, _SEEING), "tie_word_embeddings": False},
    ),
    "InternVL 3.5 with experts": (
        "internvl",
        {
            **_with_vision(
                {
                    **_LLAMA,
                    "model_type": "qwen3_moe",
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 96,
                    "mlp_only_layers": [1],
                },
                _SEEING,
            ),
            "tie_word_embeddings": False,
        },
    ),
    "Aya Vision": (
        "aya_vision",
        _with_vision(
            {**_DEEP, "model_type": "cohere2", "head_dim": 16, "pad_token_id": 0, "logit_scale": 1.0},
            {**_SEEING, "model_type": "siglip_vision_model"},
        ),
    ),
    "Mistral 3 that sees": (
        "mistral3",
        _with_vision(
            {**_LLAMA, "model_type": "mistral", "head_dim": 24},
            {**_SEEING, "model_type": "pixtral", "head_dim": 16},
        ),
    ),
    "Ministral 3 that sees": (
        "mistral3",
        _with_vision(
            {**_LLAMA, "model_type": "ministral3", "head_dim": 16, "rope_parameters": _ROPE_MINISTRAL3},
            {**_SEEING, "model_type": "pixtral", "head_dim": 16},
        ),
    ),
    "Qwen2-VL": ("qwen2_vl", _with_vision({**_LLAMA, **_MROPE}, {**_QWENS_EYES, "hidden_size": 64})),
    "Qwen2.5-VL": ("qwen2_5_vl", _with_vision({**_LLAMA, **_MROPE}, _QWENS_EYES)),
    "Qwen3-VL": (
        "qwen3_vl",
        {
            **_with_vision({**_LLAMA, "head_dim": 16, **_MROPE}, {**_QWENS_EYES, "deepstack_visual_indexes": [0]}),
            "tie_word_embeddings": True,
        },
    ),
    "LFM2": (
        "lfm2",
        _LFM2,
    ),
    "LFM2, attention first, as wide as it says": (
        "lfm2",
        {
            **_DEEP,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "LFM2 with experts": ("lfm2_moe", _LFM2_MOE),
    "LFM2 with experts, scores as they are": (
        "lfm2_moe",
        {**_LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    "LFM3, past its window": ("lfm3", {**_LFM3, "num_hidden_layers": 6, "head_dim": 24}),
    "LFM3, neither gates nor norms behind": (
        "lfm3",
        {
            **_LFM3,
            "head_dim": 16,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "LFM2-VL": ("lfm2_vl", _with_vision({**_LFM2, "num_hidden_layers": 3}, _LFM2_EYES)),
    "Qwen3.5 that sees": (
        "qwen3_5",
        {
            **_with_vision({**_QWEN3_5, "num_hidden_layers": 2, "full_attention_interval": 2}, _QWENS_EYES),
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3.5 with experts that sees": (
        "qwen3_5_moe",
        _with_vision({**_QWEN3_5_MOE, "rms_norm_eps": 3e-3}, _QWENS_EYES),
    ),
    "Qwen3-VL with experts": (
        "qwen3_vl_moe",
        _with_vision(
            {
                **_LLAMA,
                **_MROPE,
                "num_hidden_layers": 3,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 96,
                "mlp_only_layers": [1],
            },
            {**_QWENS_EYES, "deepstack_visual_indexes": [0]},
        ),
    ),
    "Command R": ("cohere", {**_LLAMA, "pad_token_id": 0, "logit_scale": 0.25}),
    "Command R+": ("cohere", {**_LLAMA, "pad_token_id": 0, "use_qk_norm": True}),
    "Command R7B, past its window": (
        "cohere2",
        {**_DEEP, "head_dim": 16, "pad_token_id": 0, "sliding_window": 11, "logit_scale": 0.3},
    ),
    "Command A+, past its window": (
        "cohere2_moe",
        {
            **_DEEP,
            "head_dim": 16,
            "sliding_window": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "logit_scale": 0.3,
        },
    ),
    "Command A+, a dense first layer": (
        "cohere2_moe",
        {
            **_DEEP,
            "head_dim": 16,
            "sliding_window": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 64,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Granite": ("granite", _GRANITE),
    "Granite Swash, past its window": ("granite_swa", _SWASH),
    "HyperCLOVA X": (
        "hyperclovax",
        {**_LLAMA, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 0.3},
    ),
    "HyperCLOVA X, norms before each part": ("hyperclovax", {**_GRANITE, "head_dim": 24, "use_post_norm": False}),
    "InternLM3": ("internlm3", {**_LLAMA, "head_dim": 24}),
    "InternLM3 with biases": ("internlm3", {**_LLAMA, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "IQuest-Coder": ("iquestcoder", {**_LLAMA, "head_dim": 24}),
    "Jais 2": ("jais2", _LLAMA),
    "Granite 4": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["attention"] * _LLAMA["num_hidden_layers"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "time_step_limit": None,
        },
    ),
    "Granite 4-H": (
        "granitemoehybrid",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "tie_word_embeddings": True},
    ),
    "Granite 4-H with experts, groups and limits of steps": (
        "granitemoehybrid",
        {
            **_GRANITE_HYBRID,
            "layer_types": ["attention", "mamba"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 192,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "time_step_limit": [0.6, 0.9],
        },
    ),
    "Nemotron": ("nemotron", {**_LLAMA, "head_dim": 16}),
    "Nemotron-H": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["mlp", "mamba", "mamba", "mlp", "mlp", "attention", "mlp", "attention"]},
    ),
    "Falcon-H1": ("falcon_h1", _FALCON_H1),
    "Falcon-H1, norms, no factors": (
        "falcon_h1",
        {
            **{name: value for name, value in _FALCON_H1.items() if "multiplier" not in name},
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "time_step_limit": [0.6, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "Nemotron 3 Nano": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
            "use_conv_bias": False,
        },
    ),
}

FIRST = {model_type: name for name, (model_type, _) in reversed(SHAPES.items())}
"""One shape of each family."""
UNLIKE = frozenset(
    FIRST[model_type]
    for model_type in (
        "gpt2",  # positions that are learned, biases, fused queries, keys and values
        "gpt_neox",  # attention beside the ffn, rotary in part
        "bloom",  # slopes
        "gpt_bigcode",  # one KV head
        "llama",
        "qwen3",  # norms of heads
        "gemma3_text",  # windows, norms on both sides, scaled embeddings
        "gemma3n_text",  # several streams, a linear beside attention, gates that are cut
        "gemma4",  # inputs of layers, keys and values that are shared, heads of two sizes, numbers of layers
        "cohere",  # norms by mean without biases, halves side by side
        "mixtral",
        "glm4_moe",  # a dense first layer, shared experts, sigmoids
        "gpt_oss",  # sinks, stored four bits
    )
)
"""Shapes that have each kind of part between them, for what depends on the parts and not on the files of a family."""
WITH_STATES = {
    name
    for name, (kind, _) in SHAPES.items()
    if kind.startswith(("lfm", "qwen3_5", "qwen3_next", "nemotron_h", "falcon_h1")) or name.startswith("Granite 4-H")
}
"""Those whose layers keep states, which only a CPU computes."""
