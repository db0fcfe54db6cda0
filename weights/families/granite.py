"""Granite 3: Llama with factors of the embedding, the scores, the residual terms and the logits; dense or of experts.

Granite 4's dense models are that with other names of the feed-forward. Most of Granite 4 has states, and is refused.

IBM Granite Team, "Granite 3.0 Language Models" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.errors import UnsupportedModelError
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source, with_ffn
from gptserve.weights.families.llama import IGNORED, NAMES, llama_sources, read_llama_config
from gptserve.weights.families.mixtral import MAX_EXPERTS
from gptserve.weights.refused import KEEPS_STATES

_OF_STATES = ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups", "n_heads", "proj_bias")


def _read_config(raw: RawConfig) -> ModelConfig:
    return _with_factors(raw, read_llama_config(raw))


def _with_factors(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the fields. The residual stream x + m f(n(x)) is computed as x / m, whose terms have no factor.

    The norm n does not see m if its eps is divided by m^2.
    """
    attention_scale = raw.positive("attention_multiplier", default=1.0)
    m = raw.positive("residual_multiplier", default=1.0)
    return replace(
        config.change_layers(lambda layer: replace(layer, attention_scale=attention_scale)),
        norm_eps=config.norm_eps / m**2,
        embed_scale=raw.positive("embedding_multiplier", default=1.0) / m,
        logit_scale=1.0 / raw.positive("logits_scaling", default=1.0),
    )


def _read_moe_config(raw: RawConfig) -> ModelConfig:
    config = _read_config(raw)
    num = raw.size("num_local_experts", default=8, limit=max(1, MAX_EXPERTS // config.num_layers))
    experts = Experts(num, raw.size("num_experts_per_tok", default=2, limit=num))
    return config.change_layers(lambda layer: replace(layer, experts=experts))


def _read_hybrid_config(raw: RawConfig) -> ModelConfig:
    """Return the fields of a model all of whose layers attend, without experts. Raises UnsupportedModelError."""
    kinds = raw.value("layer_types", raw.value("layers_block_type"))
    if not isinstance(kinds, list) or not all(kind in ("attention", "full_attention") for kind in kinds):
        raise UnsupportedModelError(
            f"granitemoehybrid {KEEPS_STATES}; those of Granite 4 without such layers and without experts are served"
        )
    raw.forbid("layer_types", kinds[:1] * raw.size("num_hidden_layers"), "each layer has a type")
    raw.default(num_local_experts=8, intermediate_size=11_008)
    raw.forbid("num_local_experts", 0, "of models without states, only those without experts are published")
    raw.forbid("normalization_function", "rmsnorm", "transformers has no other")
    raw.skip("num_experts_per_tok", "init_method", "time_step_limit", *(f"mamba_{name}" for name in _OF_STATES))
    width = raw.size("shared_intermediate_size", default=1024, limit=MAX_WIDTH)
    config = _with_factors(raw, with_ffn(read_llama_config(raw), width))
    if raw.value("position_embedding_type") == "rope":
        return config
    return config.change_layers(lambda layer: replace(layer, rotary=None))


def _moe_sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors; those of all experts of a layer are one, [experts, out, in], gates before ups."""
    sources = llama_sources(config)
    for number, layer in enumerate(config.layers):
        assert layer.experts is not None
        num, hidden, ffn = layer.experts.num, config.hidden_size, layer.ffn_size
        block, stored = f"blocks.{number}.", f"layers.{number}.block_sparse_moe."
        sources |= layout.linear(f"{block}router", [(f"{stored}router.layer", num)], hidden, bias=False)
        up, down = (
            (f"{stored}input_linear.weight", (num, 2 * ffn, hidden)),
            (f"{stored}output_linear.weight", (num, hidden, ffn)),
        )
        for e in range(num):
            sources[f"{block}experts.{e}.ffn_up.weight"] = Source((up,), entry=e)
            sources[f"{block}experts.{e}.ffn_down.weight"] = Source((down,), entry=e)
    return layout.in_order(sources)


_SHARED: layout.Names = {
    "blocks.{}.ffn_up": "layers.{}.shared_mlp.input_linear",
    "blocks.{}.ffn_down": "layers.{}.shared_mlp.output_linear",
}
GRANITE = Family("granite", _read_config, llama_sources, ignored=IGNORED, models="Granite 3")
GRANITE_MOE = Family("granitemoe", _read_moe_config, _moe_sources, ignored=IGNORED, models="Granite 3 with experts")
GRANITE_HYBRID = Family(
    "granitemoehybrid",
    _read_hybrid_config,
    layout.decoder({**NAMES, **_SHARED}),
    ignored=IGNORED,
    models="Granite 4's dense models, without Mamba",
)
