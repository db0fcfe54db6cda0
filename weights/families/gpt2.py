"""GPT-2 as Hugging Face stores it: Conv1D weights are [in, out], the query, key and value projections are one tensor.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config

NAMES = {
    "embed": "wte",
    "position": "wpe",
    "blocks.{}.attn_norm": "h.{}.ln_1",
    "blocks.{}.qkv": "h.{}.attn.c_attn",
    "blocks.{}.attn_out": "h.{}.attn.c_proj",
    "blocks.{}.ffn_norm": "h.{}.ln_2",
    "blocks.{}.ffn_up": "h.{}.mlp.c_fc",
    "blocks.{}.ffn_down": "h.{}.mlp.c_proj",
    "final_norm": "ln_f",
    "head": "lm_head",
}


def read_gpt2_config(raw: RawConfig) -> ModelConfig:
    """Return the fields; GPTBigCode replaces those in which it differs."""
    raw.forbid("add_cross_attention", False, "there is no second text to attend to")
    config = plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions")
    scale = config.layers[0].attention_scale if raw.boolean("scale_attn_weights", default=True) else 1.0
    by_depth = raw.boolean("scale_attn_by_inverse_layer_idx", default=False)
    # reorder_and_upcast_attn changes rounding in half precision only; softmax and scores are fp32 here in any case.
    scales = [scale / (depth + 1) if by_depth else scale for depth in range(config.num_layers)]
    layer = replace(config.layers[0], ffn_size=raw.size("n_inner", default=config.layers[0].ffn_size))
    return replace(
        config,
        layers=tuple(replace(layer, attention_scale=its_scale) for its_scale in scales),
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_new"),
    )


# Causal masks that old files carry.
IGNORED = r"h\.\d+\.attn\.(bias|masked_bias)"
GPT2 = Family(
    "gpt2",
    read_gpt2_config,
    layout.decoder(NAMES, transpose=True),
    ("transformer.",),
    IGNORED,
    models="GPT-2, Cerebras-GPT",
)
