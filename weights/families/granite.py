"""Granite 3: Llama with factors of the embedding, the scores, the residual terms and the logits; dense or of experts.

IBM Granite Team, "Granite 3.0 Language Models" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source
from gptserve.weights.families.llama import IGNORED, llama_sources, read_llama_config
from gptserve.weights.families.mixtral import MAX_EXPERTS


def _read_config(raw: RawConfig) -> ModelConfig:
    """Return the fields. The residual stream x + m f(n(x)) is computed as x / m, whose terms have no factor.

    The norm n does not see m if its eps is divided by m^2.
    """
    config = read_llama_config(raw)
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


GRANITE = Family("granite", _read_config, llama_sources, ignored=IGNORED, models="Granite 3")
GRANITE_MOE = Family("granitemoe", _read_moe_config, _moe_sources, ignored=IGNORED, models="Granite 3 with experts")
