"""nanochat: Llama's layout without norm weights or gate, queries and keys normalised, a capped head.

Karpathy, "nanochat" (2025), in the hub's format. It rotates in the opposite direction to Llama. It normalises queries
and keys after rotation, which is the same as before it: a rotation keeps lengths.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig
from gptserve.weights.families.llama import ATTENTION, EMBED, END, IGNORED, NORMS, read_llama_config

FFN = {"blocks.{}.ffn_up": "layers.{}.mlp.fc1", "blocks.{}.ffn_down": "layers.{}.mlp.fc2"}
NAMES: layout.Names = {**EMBED, **NORMS, **ATTENTION, **END, **FFN}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(final_logit_softcapping=15.0)
    return replace(
        read_llama_config(raw).change_layers(_turned_back),
        qk_norm="head",
        activation=raw.choice("hidden_act", ACTIVATIONS, default="relu2"),
        gated_ffn=False,
        norm_weight=False,
        embed_norm=True,
        logit_softcap=raw.number("final_logit_softcapping"),
    )


def _turned_back(layer: LayerConfig) -> LayerConfig:
    assert layer.rotary is not None
    return replace(layer, rotary=replace(layer.rotary, inv_freqs=tuple(-f for f in layer.rotary.inv_freqs)))


NANOCHAT = Family(
    "nanochat", _read_config, layout.decoder(NAMES), ignored=IGNORED, models="nanochat in the hub's format"
)
