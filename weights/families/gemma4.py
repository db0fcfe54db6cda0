"""Gemma 4 (text): Gemma 3 with wider heads where no window is, mixtures beside feed-forwards, and in the small ones
inputs of each layer and keys and values that the last layers share.

Google DeepMind, "Gemma 4" (2026), https://ai.google.dev/gemma/docs/core/model_card_4. Text is read in one direction
also where images are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from gptserve.weights.config import Experts, LayerConfig, ModelConfig, Router
from gptserve.weights.errors import UnsupportedModelError, shown
from gptserve.weights.families import layout
from gptserve.weights.families.family import ACTIVATIONS, MAX_WIDTH, Family, RawConfig, Source, with_windows
from gptserve.weights.families.gemma import NORMS, PATTERN
from gptserve.weights.families.llama import ATTENTION, EMBED, END, FFN, IGNORED, read_llama_config
from gptserve.weights.families.mixtures import read_num_experts
from gptserve.weights.families.rotary import with_rotary_by_kind
from gptserve.weights.families.with_vision import text_of

ROPE: Mapping[str, Mapping[str, object]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_OF_LAYERS = ("head_dim", "num_key_value_heads")


def _read_gemma4(raw: RawConfig) -> ModelConfig:
    raw.default(hidden_size_per_layer_input=256)
    return _read(raw)


def _read_unified(raw: RawConfig) -> ModelConfig:
    raw.forbid("enable_moe_block", False, "transformers has no mixtures for this model_type")
    raw.forbid("hidden_size_per_layer_input", 0, "transformers has no such inputs for this model_type")
    raw.skip("vocab_size_per_layer_input")
    raw.default(sliding_window=1024)
    return _read(raw)


def _read(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=256, num_key_value_heads=4, sliding_window=512)
    raw.default(rope_parameters=ROPE, replaces_null=True)
    raw.forbid("use_bidirectional_attention", "vision", "bidirectional attention cannot continue a text")
    config = with_windows(raw, read_llama_config(raw, has_rotary=False), lambda layer: (layer + 1) % PATTERN > 0)
    *others, last = config.layers
    config = replace(config, layers=(*others, replace(last, window=None)))  # whatever layer_types says of it
    config = with_rotary(raw, _with_heads(raw, config))
    config = replace(
        _with_inputs(raw, with_shared_keys(raw, config, is_wide=raw.boolean("use_double_wide_mlp", default=False))),
        activation=raw.choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"),
        norm_placement="both",
        qk_norm="head",
        v_norm=True,
        layer_scale=True,
        embed_scale=math.sqrt(config.hidden_size),
        tied_head=raw.boolean("tie_word_embeddings", default=True),
        logit_softcap=raw.number("final_logit_softcapping"),
    )
    return _with_experts(raw, config)


def _with_heads(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the heads of each layer: by `per_layer_config`, or wider ones without a window."""
    are_values, layers = raw.boolean("attention_k_eq_v", default=False), list[LayerConfig]()
    of_global: dict[str, object] = {"head_dim": raw.size("global_head_dim", default=512, limit=MAX_WIDTH)}
    if raw.value("num_global_key_value_heads") is not None and are_values:
        of_global["num_key_value_heads"] = raw.size("num_global_key_value_heads")
    numbers = [str(number) for number, layer in enumerate(config.layers) if layer.window is None]
    raw.default(per_layer_config=dict.fromkeys(numbers, of_global))
    if "per_layer_config" not in raw:  # transformers loses a null when it saves
        raise raw.error("per_layer_config", "an object")
    by_layer = raw.section("per_layer_config")
    names = {int(name): name for name in by_layer.names() if name.isdecimal()}  # with zeros in front
    for number, layer in enumerate(config.layers):
        of_layer = by_layer.section(names.get(number, str(number)))
        size = of_layer.size("head_dim", default=layer.head_size, limit=MAX_WIDTH)
        of_layer.default(num_key_value_heads=layer.num_kv_heads, replaces_null=True)
        num_kv_heads, is_same = of_layer.kv_heads(layer.num_heads), are_values and layer.window is None
        layer = replace(layer, head_size=size, num_kv_heads=num_kv_heads, attention_scale=1.0, keys_are_values=is_same)
        layers.append(layer)
    return replace(config, layers=tuple(layers))


def with_rotary(raw: RawConfig, config: ModelConfig, *, local_theta: float = 10_000.0) -> ModelConfig:
    """Return the configuration with the rotary positions of both kinds of layers.

    `local_theta` is for those with a window, of a file that does not say.
    """
    for kind in ROPE:
        section = raw.section("rope_parameters").section(kind)
        if section.value("rope_type", "default") == "default":
            section.forbid("partial_rotary_factor", 1.0, "transformers turns whole heads for this rope_type")
    return with_rotary_by_kind(raw, config, theta=1_000_000.0, local_theta=local_theta)


def with_shared_keys(raw: RawConfig, config: ModelConfig, *, is_wide: bool = False) -> ModelConfig:
    """Return the configuration whose last layers read the keys and values of the last layer of their kind before.

    With `is_wide` their feed-forwards are twice as wide.
    """
    num_own = config.num_layers - raw.count("num_kv_shared_layers", limit=config.num_layers - 1)
    layers = list(config.layers)
    last = {layer.window: number for number, layer in enumerate(layers[:num_own])}
    for number, layer in list(enumerate(layers))[num_own:]:
        if layer.window not in last:
            raise raw.error("num_kv_shared_layers", "such that layers of each kind are before those that share")
        owner, width = layers[last[layer.window]], layer.ffn_size * (2 if is_wide else 1)
        if (owner.num_kv_heads, owner.head_size) != (layer.num_kv_heads, layer.head_size):
            raise raw.error("per_layer_config", f"the same for layers {last[layer.window]} and {number}, which shares")
        layers[number] = replace(layer, ffn_size=width, kv_layer=last[layer.window], keys_are_values=False)
    return replace(config, layers=tuple(layers))


def _with_inputs(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    size = raw.count("hidden_size_per_layer_input", limit=MAX_WIDTH)
    num = raw.size("vocab_size_per_layer_input", default=262_144)
    if size and num != config.vocab_size:
        raise UnsupportedModelError(
            f"{raw.file_name}: vocab_size_per_layer_input must be vocab_size ({config.vocab_size}), got {shown(num)}: "
            "a token without an input of each layer is not computed"
        )
    return replace(config, layer_input_size=size or None)


def _with_experts(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Return the configuration with a mixture beside each feed-forward, if it has any."""
    raw.skip("expert_intermediate_size")  # the older name
    if not raw.boolean("enable_moe_block", default=False):
        raw.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return config
    num = read_num_experts(raw, ("num_experts",), config.num_layers)
    experts = Experts(num, raw.size("top_k_experts", limit=num), Router(has_factors=True))
    width = raw.size("moe_intermediate_size", limit=MAX_WIDTH)
    return config.change_layers(
        lambda layer: replace(layer, experts=experts, ffn_size=width, dense_size=layer.ffn_size)
    )


_BESIDE = {
    "blocks.{}.dense_output_norm": "layers.{}.post_feedforward_layernorm_1",
    "blocks.{}.router_norm": "layers.{}.router.scale",
    "blocks.{}.experts_norm": "layers.{}.pre_feedforward_layernorm_2",
    "blocks.{}.experts_output_norm": "layers.{}.post_feedforward_layernorm_2",
}
_INPUTS = {
    "input_embed": "embed_tokens_per_layer",
    "input_proj": "per_layer_model_projection",
    "input_norm": "per_layer_projection_norm",
}
_INPUT = {
    "blocks.{}.input_gate": "layers.{}.per_layer_input_gate",
    "blocks.{}.input_out": "layers.{}.per_layer_projection",
    "blocks.{}.input_output_norm": "layers.{}.post_per_layer_input_norm",
    "blocks.{}.scale": "layers.{}.layer_scalar",
}
NAMES: layout.Names = {**EMBED, **_INPUTS, **NORMS, **ATTENTION, **FFN, **_BESIDE, **_INPUT, **END}
_dense_sources = layout.decoder(NAMES)


def _sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors; those of all experts of a layer are one, [experts, out, in], gates before ups."""
    found = _dense_sources(config)
    for number, layer in enumerate(config.layers):
        if layer.experts is None:
            continue
        num, hidden, ffn = layer.experts.num, config.hidden_size, layer.ffn_size
        block, stored = f"blocks.{number}.", f"layers.{number}."
        found |= layout.linear(f"{block}router", [(f"{stored}router.proj", num)], hidden, bias=False)
        found[f"{block}router.factors"] = Source(((f"{stored}router.per_expert_scale", (num,)),), is_wide=True)
        found |= layout.joined_experts(number, num, f"{stored}experts.", hidden, ffn)
    return layout.in_order(found)


IGNORED_KEYS = rf"{IGNORED}|layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight"
"""Of layers that share keys and values, too, whose files may have their own."""
IGNORED_OF_IMAGES = r"(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\..*"
_SIZES: dict[str, object] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
GEMMA4 = Family("gemma4_text", _read_gemma4, _sources, ignored=IGNORED_KEYS, models="Gemma 4")
GEMMA4_UNIFIED = Family("gemma4_unified_text", _read_unified, _sources, ignored=IGNORED_KEYS, models="Gemma 4 12B")
GEMMA4_WITH_VISION = replace(
    text_of("gemma4", GEMMA4, models="Gemma 4", tied_head=True, defaults_of={"gemma4_text": _SIZES}),
    ignored=f"{IGNORED_KEYS}|{IGNORED_OF_IMAGES}",
)
GEMMA4_UNIFIED_WITH_VISION = replace(
    text_of(
        "gemma4_unified",
        GEMMA4_UNIFIED,
        models="Gemma 4 12B",
        tied_head=True,
        defaults_of={"gemma4_unified_text": {**_SIZES, "max_position_embeddings": 262_144}},
    ),
    ignored=f"{IGNORED_KEYS}|{IGNORED_OF_IMAGES}",
)
