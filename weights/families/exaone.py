"""EXAONE 3, 3.5 and Deep: Llama under GPT-2's names, of the fields of config.json and of the tensors.

LG AI Research, "EXAONE 3.0 7.8B Instruction Tuned Language Model" (2024) and "EXAONE 3.5: Series of Large Language
Models for Real-world Use Cases" (2024).
"""

from __future__ import annotations

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.llama import read_llama_config

_OLDER_NAMES = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
"""transformers' names of the fields, and those of the published files."""
_NAMES: layout.Names = {
    "embed": "wte",
    "blocks.{}.attn_norm": "h.{}.ln_1",
    "blocks.{}.qkv": tuple(f"h.{{}}.attn.attention.{part}_proj" for part in "qkv"),
    "blocks.{}.attn_out": "h.{}.attn.attention.out_proj",
    "blocks.{}.ffn_norm": "h.{}.ln_2",
    "blocks.{}.ffn_up": ("h.{}.mlp.c_fc_0", "h.{}.mlp.c_fc_1"),
    "blocks.{}.ffn_down": "h.{}.mlp.c_proj",
    "final_norm": "ln_f",
    "head": "lm_head",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    for name, older in _OLDER_NAMES.items():
        if (value := raw.value(older)) is not None:
            raw.default(replaces_null=False, **{name: value})
            raw.forbid(older, raw.value(name), f"it is another name of {name}")
    raw.default(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500_000.0)
    return read_llama_config(raw)


EXAONE = Family(
    "exaone",
    _read_config,
    layout.decoder(_NAMES),
    prefixes=("transformer.",),
    models="EXAONE 3, 3.5, Deep",
)
