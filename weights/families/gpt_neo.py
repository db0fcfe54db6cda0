"""GPT-Neo, after GPT-3: every other layer has a window, and scores are not scaled.

Black et al., "GPT-Neo" (2021), after Brown et al., "Language Models are Few-Shot Learners" (2020), section 2.1.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import gpt2, layout
from gptserve.weights.families.family import ACTIVATIONS, Family, RawConfig, plain_config

KINDS = ("global", "local")
NAMES: layout.Names = {
    **gpt2.NAMES,
    "blocks.{}.qkv": ("h.{}.attn.attention.q_proj", "h.{}.attn.attention.k_proj", "h.{}.attn.attention.v_proj"),
    "blocks.{}.attn_out": "h.{}.attn.attention.out_proj",
}


def _read_config(raw: RawConfig) -> ModelConfig:
    config = plain_config(raw, layers="num_layers", heads="num_heads")
    kinds = _layer_kinds(raw, config.num_layers)
    window = raw.size("window_size", default=256)
    every = config.layers[0]
    every = replace(every, attention_scale=1.0, ffn_size=raw.size("intermediate_size", default=every.ffn_size))
    local = replace(every, window=window)
    return replace(
        config,
        layers=tuple(local if kind == "local" else every for kind in kinds),
        qkv_bias=False,
        activation=raw.choice("activation_function", ACTIVATIONS, default="gelu_new"),
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


IGNORED = r"h\.\d+\.attn\.attention\.(bias|masked_bias)"
GPT_NEO = Family(
    "gpt_neo",
    _read_config,
    layout.decoder(NAMES),
    ("transformer.",),
    IGNORED,
    models="GPT-Neo, which has GPT-3's architecture",
)
