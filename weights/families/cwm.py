"""CWM: Llama 3 with a window on three layers of four.

FAIR CodeGen Team, "CWM: An Open-Weights LLM for Research on Code Generation with World Models" (2025).
"""

from __future__ import annotations

from gptserve.weights.config import ModelConfig
from gptserve.weights.families.family import Family, RawConfig, with_windows
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config

PATTERN = 4  # the first of every four layers has no window
SCALING = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    raw.default(rope_theta=1_000_000.0, sliding_window=8192)
    if "rope_scaling" not in raw:
        raw.default(rope_parameters=SCALING, replaces_null=True)
    return with_windows(raw, read_llama_config(raw), lambda layer: layer % PATTERN > 0)


CWM = Family("cwm", _read_config, llama_sources, ignored=IGNORED, models="CWM")
