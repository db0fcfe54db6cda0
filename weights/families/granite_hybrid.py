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
from gptserve.weights.families.mamba import MAX_CONV_SIZE, check_mixer, read_step_limits, with_mixers

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
    num_heads = raw.size("mamba_n_heads", default=128)
    num_groups = raw.size("mamba_n_groups", default=1)
    width = raw.size("mamba_expand", default=2, limit=MAX_WIDTH) * hidden
    if num_heads % num_groups or width % num_heads:
        raise raw.error("mamba_n_heads", f"a multiple of mamba_n_groups ({num_groups}) and a divisor of {width}")
    if raw.value("mamba_d_head", "auto") not in ("auto", width // num_heads):
        raise raw.error("mamba_d_head", f'"auto" or {width // num_heads}')
    space = StateSpace(
        num_groups,
        num_heads,
        key_size=raw.size("mamba_d_state", default=256, limit=MAX_WIDTH),
        value_size=width // num_heads,
        conv_size=raw.size("mamba_d_conv", default=4, limit=MAX_CONV_SIZE),
        norm_eps=raw.positive("rms_norm_eps", default=1e-6),
        step_limits=read_step_limits(raw, "time_step_limit"),
        has_conv_bias=raw.boolean("mamba_conv_bias", default=False),
    )
    return check_mixer(raw, "mamba_n_heads", space)


_dense = with_mixers(layout.decoder({**NAMES, **_HYBRID}), _MIXER)
_mixed = with_mixers(moe_sources, _MIXER)


def _sources(config: ModelConfig) -> dict[str, Source]:
    return (_mixed if config.has_experts else _dense)(config)


GRANITE_HYBRID = Family("granitemoehybrid", _read, _sources, ignored=IGNORED, models="Granite 4")
