"""GPT-1: norms after each sum and none at the end, Conv1D weights as in GPT-2.

Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import gpt2, layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config

NAMES = {**gpt2.NAMES, "embed": "tokens_embed", "position": "positions_embed"}


def _read_config(raw: RawConfig) -> ModelConfig:
    return replace(
        plain_config(raw, width="n_embd", layers="n_layer", heads="n_head", context="n_positions"),
        # Its files say "gelu" for the approximation with tanh.
        activation=raw.choice("afn", {**ACTIVATIONS, "gelu": "gelu_tanh"}, default="gelu"),
        norm_placement="sum",
    )


# The causal mask and the numbers of the positions.
IGNORED = r"h\.\d+\.attn\.bias|position_ids"
OPENAI_GPT = Family(
    "openai-gpt", _read_config, layout.decoder(NAMES, transpose=True), ("transformer.",), IGNORED, models="GPT-1"
)
