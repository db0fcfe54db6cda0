"""CodeGen: GPT-J with one projection for queries, values and keys, stored as the four chips had it that trained it.

Nijkamp et al., "CodeGen: An Open Large Language Model for Code with Multi-Turn Program Synthesis" (2022).
"""

from __future__ import annotations

from gptserve.weights.config import LayerConfig, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig
from gptserve.weights.families.gptj import IGNORED, NAMES, read_gptj_config

NUM_CHIPS = 4


def _read_config(raw: RawConfig) -> ModelConfig:
    config = read_gptj_config(raw)
    if config.layers[0].num_heads % NUM_CHIPS:
        raise raw.error("n_head", f"a multiple of {NUM_CHIPS}")
    return config


def _chips_apart(layer: LayerConfig) -> tuple[int, ...]:
    """Return the row order of a projection that has each chip's queries, values and keys in turn, paired as GPT-J's."""
    size = layer.q_size // NUM_CHIPS
    rows = [(chip * 3 + part) * size + row for part in (0, 2, 1) for chip in range(NUM_CHIPS) for row in range(size)]
    turned = layout.halves_apart(layer)
    assert turned is not None
    return tuple(rows[row] for row in turned)


_sources = layout.decoder({**NAMES, "blocks.{}.qkv": "h.{}.attn.qkv_proj"}, qkv_order=_chips_apart)
CODEGEN = Family(
    "codegen", _read_config, _sources, ("transformer.",), rf"{IGNORED}|h\.\d+\.attn\.causal_mask", models="CodeGen"
)
