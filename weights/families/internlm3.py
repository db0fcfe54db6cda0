"""InternLM3 and IQuest-Coder: Llama with other defaults and, InternLM3, other names of the biases.

Cai et al., "InternLM2 Technical Report" (2024); IQuest Lab, "IQuest-Coder-V1 Technical Report" (2026).
"""

from __future__ import annotations

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_internlm3(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5)
    raw.default(attention_bias=raw.value("qkv_bias"), mlp_bias=raw.value("bias"))
    config = read_llama_config(raw)
    raw.forbid("qkv_bias", config.qkv_bias, "it is another name of attention_bias")
    for name in ("bias", "mlp_bias"):
        raw.forbid(name, config.qkv_bias, "transformers has biases everywhere or nowhere")
    return config


def _read_iquest(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    for name, value in (("clip_qkv", None), ("use_sliding_window", False)):
        raw.forbid(name, value, "no published model has another")
    raw.skip("sliding_window", "max_window_layers")
    return read_llama_config(raw)


INTERNLM3 = Family("internlm3", _read_internlm3, llama_sources, ignored=IGNORED, models="InternLM3")
IQUESTCODER = Family("iquestcoder", _read_iquest, llama_sources, ignored=IGNORED, models="IQuest-Coder")
