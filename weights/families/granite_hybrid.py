"""Granite 4: Granite's factors around layers of Mamba-2 and some of attention; dense, or of experts and a shared one.

IBM Granite Team, "Granite 4.0" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig, StateSpace
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source, with_ffn
from gptserve.weights.families.granite import SHARED, moe_sources, with_factors, with_shared_experts
from gptserve.weights.families.llama import IGNORED, NAMES, read_llama_config
from gptserve.weights.families.mamba import read_space, with_mixers

_ATTENDS = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}
_HYBRID: layout.Names = {"blocks.{}.ffn_up": SHARED.up[0], "blocks.{}.ffn_down": SHARED.down}
_MIXER = "layers.{}.mamba"


def _read(raw: RawConfig) -> ModelConfig:
    raw.default(num_local_experts=8, intermediate_size=11_008, shared_intermediate_size=1024, mamba_conv_bias=True)
    raw.forbid("normalization_function", "rmsnorm", "transformers has no other")
    raw.skip("init_method", "mamba_chunk_size", "num_experts_per_tok", "time_step_limit")
    raw.skip(*(f"mamba_{name}" for name in ("conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups")))
    raw.skip("mamba_n_heads", "mamba_proj_bias")
    width = raw.size("shared_intermediate_size", limit=MAX_WIDTH)
    config = read_llama_config(raw)
    has_experts = raw.count("num_local_experts") > 0
    config = with_factors(raw, with_shared_experts(raw, config) if has_experts else with_ffn(config, width))
    if raw.value("position_embedding_type") != "rope":
        config = config.change_layers(lambda layer: replace(layer, rotary=None))
    name = "layer_types" if "layer_types" in raw else "layers_block_type"
    kinds = raw.strings(name, _ATTENDS, length=config.num_layers) or ("mamba",) * config.num_layers
    raw.skip("layers_block_type")
    if all(_ATTENDS[kind] for kind in kinds):
        return config
    space = _read_space(raw, config.hidden_size)

    def layer_of(kind: str, layer: LayerConfig) -> LayerConfig:
        mixing = LayerConfig(0, 0, 0, 1.0, layer.ffn_size, experts=layer.experts, recurrence=space)
        return layer if _ATTENDS[kind] else mixing

    layers = zip(kinds, config.layers, strict=True)
    return replace(config, layers=tuple(layer_of(*its) for its in layers))


def _read_space(raw: RawConfig, hidden: int) -> StateSpace:
    raw.forbid("hidden_act", "silu", "convolutions of Mamba-2 have no other here")
    raw.forbid("mamba_proj_bias", False, "projections of Mamba-2 with biases are not computed")
    width = raw.size("mamba_expand", default=2, limit=MAX_WIDTH) * hidden
    return read_space(raw, width, norm_eps=raw.positive("rms_norm_eps", default=1e-6))


_dense = with_mixers(layout.decoder({**NAMES, **_HYBRID}), _MIXER)
_mixed = with_mixers(moe_sources, _MIXER)


def _sources(config: ModelConfig) -> dict[str, Source]:
    return (_mixed if config.has_experts else _dense)(config)


GRANITE_HYBRID = Family("granitemoehybrid", _read, _sources, ignored=IGNORED, models="Granite 4")
