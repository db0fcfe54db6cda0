"""Falcon-H1: attention and Mamba-2 side by side in every layer, and factors of what linears give.

Zuo et al., "Falcon-H1: A Family of Hybrid-Head Language Models" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import LayerConfig, ModelConfig, StateSpace
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source
from gptserve.weights.families.llama import ATTENTION, EMBED, IGNORED, read_llama_config
from gptserve.weights.families.mamba import read_space, with_mixers

_FFN = "layers.{}.feed_forward."
_NAMES: layout.Names = {
    **EMBED,
    "blocks.{}.attn_norm": "layers.{}.input_layernorm",
    "blocks.{}.ffn_norm": "layers.{}.pre_ff_layernorm",
    **ATTENTION,
    "blocks.{}.ffn_up": (f"{_FFN}gate_proj", f"{_FFN}up_proj"),
    "blocks.{}.ffn_down": f"{_FFN}down_proj",
    "final_norm": "final_layernorm",
    "head": "lm_head",
}
_UNREAD = (
    "mamba_chunk_size",
    "mamba_expand",
    "num_logits_to_keep",
    "attn_layer_indices",
    "mamba_use_mlp",
    "layer_types",
)


def _read(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=8192, mamba_conv_bias=True)
    raw.default(mamba_d_ssm=1024, mamba_norm_before_gate=True)
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        raw.forbid(name, False, "factors of linears with biases are not computed")
    raw.forbid("hidden_act", "silu", "convolutions of Mamba-2 have no other here")
    for name, value in (("attn_layer_indices", None), ("mamba_use_mlp", True)):
        raw.forbid(name, value, "transformers has no other")
    config = read_llama_config(raw)
    space = _read_space(raw, config)
    ins, out = (_factor(raw, f"attention_{which}") for which in ("in", "out"))
    of_scores = ins**2 * _factor(raw, "key")

    def with_space(layer: LayerConfig) -> LayerConfig:
        return replace(layer, attention_scale=layer.attention_scale * of_scores, recurrence=space)

    raw.skip(*_UNREAD)
    return replace(
        config.change_layers(with_space),
        embed_scale=_factor(raw, "embedding"),
        logit_scale=_factor(raw, "lm_head"),
        weight_factors=(("attn_out", (ins * out,)), *_of_feed_forward(raw), *_of_mixer(raw)),
    )


def _read_space(raw: RawConfig, config: ModelConfig) -> StateSpace:
    width = raw.size("mamba_d_ssm", default=raw.size("mamba_expand", default=2) * config.hidden_size, limit=MAX_WIDTH)
    has_norm = raw.boolean("mamba_rms_norm", default=False)
    if has_norm:
        raw.forbid("mamba_norm_before_gate", False, "a norm before the gates is not computed")
    raw.skip("mamba_norm_before_gate")
    return read_space(raw, width, norm_eps=config.norm_eps, has_norm=has_norm)


def _factor(raw: RawConfig, what: str) -> float:
    return _bounded(raw, f"{what}_multiplier", (raw.positive(f"{what}_multiplier", default=1.0),))[0]


def _factors(raw: RawConfig, name: str, length: int) -> tuple[float, ...]:
    return _bounded(raw, name, raw.numbers(name, length=length) if name in raw else (1.0,) * length)


def _bounded(raw: RawConfig, name: str, factors: tuple[float, ...]) -> tuple[float, ...]:
    """Return factors of which products are numbers, too."""
    if not all(1e-6 <= factor <= 1e6 for factor in factors):
        raise raw.error(name, "from 1e-6 to 1e6")
    return factors


def _of_feed_forward(raw: RawConfig) -> tuple[tuple[str, tuple[float, ...]], ...]:
    gate, down = _factors(raw, "mlp_multipliers", 2)
    return ("ffn_up", (gate, 1.0)), ("ffn_down", (down,))


def _of_mixer(raw: RawConfig) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Return the factors of a mixer. Those of what is convolved multiply the factors of the convolution."""
    ins, out = (_factor(raw, f"ssm_{which}") for which in ("in", "out"))
    gates, values, keys, queries, steps = (ins * its for its in _factors(raw, "ssm_multipliers", 5))
    convolved = ("memory_conv", (queries, keys, values))
    return ("memory_gate", (gates,)), convolved, ("memory_rates", (steps,)), ("memory_out", (out,))


_plain = with_mixers(layout.decoder(_NAMES), "layers.{}.mamba")


def _sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors; weights are multiplied by their factors."""
    found, factors = _plain(config), dict(config.weight_factors)
    space = config.layers[0].recurrence
    assert isinstance(space, StateSpace)
    sizes = [size * space.conv_size for size in (space.key_width, space.key_width, space.value_width)]
    for name, source in found.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if not name.endswith(".weight") or kind not in factors:
            continue
        its, num = factors[kind], source.shape[0]
        rows = sizes if kind == "memory_conv" else [num // len(its)] * len(its)
        if set(its) != {1.0}:
            found[name] = replace(source, factors=tuple(zip(rows, its, strict=True)))
    return found


FALCON_H1 = Family("falcon_h1", _read, _sources, ignored=IGNORED, models="Falcon-H1")
