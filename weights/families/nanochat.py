"""nanochat: Llama's layout without norm weights or gate, queries and keys normalised, a capped head.

Karpathy, "nanochat" (2025), in the hub's format. It turns its rotary pairs the other way round than Llama, and
normalises them afterwards, which is the same as before: turning keeps lengths.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config


def _read_config(raw: RawConfig) -> ModelConfig:
    config = read_llama_config(raw)
    turned_back = tuple(
        replace(rotary, inv_freqs=tuple(-f for f in rotary.inv_freqs)) for rotary in config.rotaries if rotary
    )
    return replace(
        config,
        rotaries=turned_back,
        qk_norm="head",
        activation=raw.choice("hidden_act", ACTIVATIONS, default="relu2"),
        gated_ffn=False,
        norm_weight=False,
        embed_norm=True,
        logit_softcap=raw.number("final_logit_softcapping"),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    sources = llama_sources(config, ffn=False)
    for layer in range(config.num_layers):
        block, mlp = f"blocks.{layer}.", f"layers.{layer}.mlp."
        up, down = [(f"{mlp}fc1", config.ffn_size)], [(f"{mlp}fc2", config.hidden_size)]
        sources |= layout.linear(f"{block}ffn_up", up, config.hidden_size, bias=False)
        sources |= layout.linear(f"{block}ffn_down", down, config.ffn_size, bias=False)
    return sources


NANOCHAT = Family(
    model_type="nanochat", read_config=_read_config, sources=_sources, prefixes=("model.",), ignored=IGNORED
)
