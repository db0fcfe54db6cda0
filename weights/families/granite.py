"""Granite 3: Llama with factors of the embedding, the scores, the residual terms and the logits; dense or of experts.

Granite Swash has windows on three layers of four, sinks, and rotary positions of a base of each layer's own.

IBM Granite Team, "Granite 3.0 Language Models" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source, with_windows
from gptserve.weights.families.llama import IGNORED, NAMES, SINKS, llama_sources, read_llama_config
from gptserve.weights.families.mixtral import MAX_EXPERTS
from gptserve.weights.families.rotary import read_rotary


def _read_config(raw: RawConfig) -> ModelConfig:
    return with_factors(raw, read_llama_config(raw))


def with_factors(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with Granite's factors.

    The residual stream x + m f(n(x)) is computed as x / m, whose terms have no factor. The norm n does not see m if its
    eps is divided by m^2.
    """
    attention_scale = raw.positive("attention_multiplier", default=1.0)
    m = raw.positive("residual_multiplier", default=1.0)
    if not 1e-6 <= m <= 1e6:
        raise raw.error("residual_multiplier", "a number from 1e-6 to 1e6")
    return replace(
        config.change_layers(lambda layer: replace(layer, attention_scale=attention_scale)),
        norm_eps=config.norm_eps / m**2,
        embed_scale=raw.positive("embedding_multiplier", default=1.0) / m,
        logit_scale=1.0 / raw.positive("logits_scaling", default=1.0),
    )


def _read_moe_config(raw: RawConfig) -> ModelConfig:
    return _with_experts(raw, _read_config(raw))


def _read_shared_config(raw: RawConfig) -> ModelConfig:
    return with_shared_experts(raw, _read_config(raw))


def _read_swa_config(raw: RawConfig) -> ModelConfig:
    raw.default(rms_norm_eps=1e-5, tie_word_embeddings=True)
    return _with_windows(raw, _read_config(raw))


def _read_moe_swa_config(raw: RawConfig) -> ModelConfig:
    return _with_windows(raw, with_shared_experts(raw, _read_config(raw)))


def _with_windows(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with windows, sinks, and the base of each layer's rotation, 0 for none."""
    raw.default(sliding_window=128)
    config = replace(with_windows(raw, config, lambda layer: layer % PATTERN > 0), attention_sinks=True)
    thetas = raw.value("layer_rope_theta")
    if thetas is None:
        return config
    if not isinstance(thetas, list) or len(thetas) != config.num_layers or not all(map(_is_base, thetas)):
        raise raw.error("layer_rope_theta", f"a list of {config.num_layers}, each 0 or a number above 1")
    scaling, context = raw.value("rope_parameters") or {}, raw.size("max_position_embeddings")
    assert isinstance(scaling, dict)  # as read before
    rotary = {}
    for theta in set(thetas) - {0}:
        its_own = RawConfig({**scaling, "rope_theta": theta})
        rotary[theta], _ = read_rotary(raw, config.layers[0].head_size, context, scaling=its_own)
    layers = zip(config.layers, thetas, strict=True)
    return replace(config, layers=tuple(replace(layer, rotary=rotary.get(theta)) for layer, theta in layers))


def _is_base(theta: object) -> bool:
    """Return whether it is a base of rotary positions, or 0 for none."""
    return isinstance(theta, int | float) and (theta == 0 or 1 < theta < math.inf)


def with_shared_experts(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    width = raw.count("shared_intermediate_size", limit=MAX_WIDTH)
    if width % config.layers[0].ffn_size:
        raise raw.error("shared_intermediate_size", f"a multiple of intermediate_size ({config.layers[0].ffn_size})")
    return _with_experts(raw, config, num_shared=width // config.layers[0].ffn_size)


def _with_experts(raw: RawConfig, config: ModelConfig, num_shared: int = 0) -> ModelConfig:
    num = raw.size("num_local_experts", default=8, limit=max(1, MAX_EXPERTS // config.num_layers))
    experts = Experts(num, raw.size("num_experts_per_tok", default=2, limit=num), num_shared=num_shared)
    return config.change_layers(lambda layer: replace(layer, experts=experts))


def _with_moe(names: layout.Names, router: str, up: str, down: str) -> Callable[[ModelConfig], dict[str, Source]]:
    """Return the function to all tensors; those of all experts of a layer are one, [experts, out, in], gates first."""

    def sources(config: ModelConfig) -> dict[str, Source]:
        found = layout.decoder(names)(config)
        for number, layer in enumerate(config.layers):
            assert layer.experts is not None
            num, hidden, ffn = layer.experts.num, config.hidden_size, layer.ffn_size
            block, stored = f"blocks.{number}.", f"layers.{number}.block_sparse_moe."
            found |= layout.linear(f"{block}router", [(f"{stored}{router}", num)], hidden, bias=False)
            ups, downs = (f"{stored}{up}", (num, 2 * ffn, hidden)), (f"{stored}{down}", (num, hidden, ffn))
            for e in range(num):
                found[f"{block}experts.{e}.ffn_up.weight"] = Source((ups,), entry=e)
                found[f"{block}experts.{e}.ffn_down.weight"] = Source((downs,), entry=e)
            found |= layout.shared_experts(SHARED, number, layer, hidden)
        return layout.in_order(found)

    return sources


PATTERN = 4  # Granite Swash: the first of four layers has no window
SHARED = layout.Shared(("layers.{}.shared_mlp.input_linear",), "layers.{}.shared_mlp.output_linear")
moe_sources = _with_moe(NAMES, "router.layer", "input_linear.weight", "output_linear.weight")
GRANITE = Family("granite", _read_config, llama_sources, ignored=IGNORED, models="Granite 3")
GRANITE_MOE = Family("granitemoe", _read_moe_config, moe_sources, ignored=IGNORED, models="Granite 3 with experts")
GRANITE_MOE_SHARED = Family(
    "granitemoeshared", _read_shared_config, moe_sources, ignored=IGNORED, models="Granite with shared experts"
)
GRANITE_SWA = Family(
    "granite_swa", _read_swa_config, layout.decoder({**NAMES, **SINKS}), ignored=IGNORED, models="Granite Swash"
)
GRANITE_MOE_SWA = Family(
    "granitemoe_swa",
    _read_moe_swa_config,
    _with_moe({**NAMES, **SINKS}, "router", "experts.gate_up_proj", "experts.down_proj"),
    ignored=IGNORED,
    models="Granite Swash with experts",
)
