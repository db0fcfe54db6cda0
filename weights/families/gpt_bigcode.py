"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with one key and value head for all queries.

Ben Allal et al., "SantaCoder: don't reach for the stars!" (2023).
"""

from __future__ import annotations

import re

from weights.config import ModelConfig
from weights.families import layout
from weights.families.family import ACTIVATIONS, MAX_LAYERS, Family, RawConfig, Source


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.forbid("add_cross_attention", False, "there is no second text to attend to")
    hidden_size, num_heads, head_size = raw.size("n_embd"), raw.size("n_head"), raw.share("n_embd", "n_head")
    num_layers = raw.size("n_layer", limit=MAX_LAYERS)
    scale = head_size**-0.5 if raw.boolean("scale_attn_weights", default=True) else 1.0
    return ModelConfig(
        model_type="gpt_bigcode",
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_position=raw.size("n_positions"),
        num_heads=num_heads,
        num_kv_heads=1 if raw.boolean("multi_query", default=True) else num_heads,
        head_size=head_size,
        attention_scales=(scale,) * num_layers,
        attention_windows=(None,) * num_layers,
        ffn_size=raw.size("n_inner", default=4 * hidden_size),
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_pytorch_tanh"),
        norm_eps=raw.positive("layer_norm_epsilon", default=1e-5),
        tied_head=raw.boolean("tie_word_embeddings", default=True),
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    hidden, ffn, heads = config.hidden_size, config.ffn_size, config.num_heads
    order = layout.heads_together(heads, config.head_size) if config.num_kv_heads == heads else None
    sources = layout.table("embed", "wte", config.vocab_size, hidden)
    sources |= layout.table("position", "wpe", config.max_position, hidden)
    for layer in range(config.num_layers):
        block, stored = f"blocks.{layer}.", f"h.{layer}."
        qkv = [(f"{stored}attn.c_attn", config.qkv_size)]
        sources |= layout.norm(config, f"{block}attn_norm", f"{stored}ln_1")
        sources |= layout.linear(f"{block}qkv", qkv, hidden, bias=True, row_order=order)
        sources |= layout.linear(f"{block}attn_out", [(f"{stored}attn.c_proj", hidden)], hidden, bias=True)
        sources |= layout.norm(config, f"{block}ffn_norm", f"{stored}ln_2")
        sources |= layout.linear(f"{block}ffn_up", [(f"{stored}mlp.c_fc", ffn)], hidden, bias=True)
        sources |= layout.linear(f"{block}ffn_down", [(f"{stored}mlp.c_proj", hidden)], ffn, bias=True)
    return sources | layout.norm(config, "final_norm", "ln_f") | layout.head(config, "lm_head")


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    read_config=_read_config,
    sources=_sources,
    prefixes=("transformer.",),
    ignored=re.compile(r"h\.\d+\.attn\.bias|lm_head\.weight"),
)
