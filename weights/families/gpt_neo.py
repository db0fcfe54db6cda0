"""GPT-Neo, GPT-3's architecture: every other layer sees a window only, and scores are not scaled.

Black et al., "GPT-Neo" (2021), after Brown et al., "Language Models are Few-Shot Learners" (2020), section 2.1.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, Source, plain_config

KINDS = ("global", "local")


def _read_config(raw: RawConfig) -> ModelConfig:
    config = plain_config(
        raw, width="hidden_size", layers="num_layers", heads="num_heads", context="max_position_embeddings"
    )
    kinds = _layer_kinds(raw, config.num_layers)
    window = raw.size("window_size", default=256)
    return replace(
        config,
        attention_scales=(1.0,) * config.num_layers,
        attention_windows=tuple(window if kind == "local" else None for kind in kinds),
        ffn_size=raw.size("intermediate_size", default=config.ffn_size),
        qkv_bias=False,
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_new"),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _layer_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Return "global" or "local" per layer: attention_layers, or the shorter attention_types, which must agree.

    attention_types is a list such as [[["global", "local"], 6]]: these two kinds of layer, six times over.
    """
    kinds = raw.strings("attention_layers", KINDS, length=num_layers)
    runs = raw.value("attention_types")
    if runs is None:
        if kinds is None:
            raise raw.error("attention_layers", f"a list of {num_layers}")
        return kinds
    expanded: list[object] = []
    for run in runs if isinstance(runs, list) else [runs]:
        match run:
            case [list(pattern), int(times)] if 0 <= len(pattern) * times <= num_layers - len(expanded):
                expanded += pattern * times
            case _:
                raise raw.error("attention_types", f"a list of [kinds, how many times] for {num_layers} layers")
    if len(expanded) < num_layers or not all(kind in KINDS for kind in expanded):
        raise raw.error("attention_types", f"a list of [kinds, how many times] for {num_layers} layers")
    if kinds is not None and list(kinds) != expanded:
        raise raw.error("attention_types", "the same as attention_layers")
    return tuple(map(str, expanded))


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn = config.hidden_size, config.ffn_size
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    sources |= layout.table("position", "wpe", config.max_position, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        attention = f"{stored}attn.attention."
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.linear(f"{block}qkv", layout.split_qkv(config, attention), hidden, bias=False)
        sources |= layout.linear(f"{block}attn_out", [(f"{attention}out_proj", hidden)], hidden, bias=True)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}ln_2")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.c_fc", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.c_proj", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "ln_f") | layout.head(config, "lm_head")


GPT_NEO = Family(
    model_type="gpt_neo",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"h\.\d+\.attn\.attention\.(bias|masked_bias)|lm_head\.weight"),
)
