"""Qwen3.5: three layers of linear attention for each layer of gated attention.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); Qwen Team, "Qwen3.5" (2026). Its text is
read alone. Layers that predict a second token (mtp) are left out.
"""

from __future__ import annotations

from dataclasses import replace

from gptserve.weights.config import GatedDelta, LayerConfig, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source
from gptserve.weights.families.llama import EMBED, END, FFN, IGNORED, NORMS, read_llama_config
from gptserve.weights.families.rotary import with_rotary

_KINDS = ("linear_attention", "full_attention")
_MAX_CONV_SIZE = 64
TILED = "linear_value_heads_are_tiled"
"""What the folder of a GGUF file says, and no other one: value heads take all key heads in turn."""
_ATTENTION = "layers.{}.self_attn."
DELTA = "layers.{}.linear_attn."
NAMES: layout.Names = {
    **EMBED,
    **NORMS,
    "blocks.{}.q_norm": f"{_ATTENTION}q_norm",
    "blocks.{}.k_norm": f"{_ATTENTION}k_norm",
    "blocks.{}.attn_out": f"{_ATTENTION}o_proj",
    "blocks.{}.memory_in": f"{DELTA}in_proj_qkv",
    "blocks.{}.memory_gate": f"{DELTA}in_proj_z",
    "blocks.{}.memory_rates": (f"{DELTA}in_proj_b", f"{DELTA}in_proj_a"),
    "blocks.{}.memory_conv": f"{DELTA}conv1d",
    "blocks.{}.memory_decay": f"{DELTA}A_log",
    "blocks.{}.memory_step": f"{DELTA}dt_bias",
    "blocks.{}.memory_norm": f"{DELTA}norm",
    "blocks.{}.memory_out": f"{DELTA}out_proj",
    **FFN,
    **END,
}
_others = layout.decoder(NAMES)


def read_qwen3_5_config(raw: RawConfig) -> ModelConfig:
    """Return the fields of Qwen3.5, which its mixtures share."""
    raw.default(head_dim=256, num_key_value_heads=4)
    raw.forbid("attention_bias", False, "its gates would have biases, too")
    raw.forbid("attn_output_gate", True, "transformers has no other for this model_type")
    raw.forbid("output_gate_type", "swish", "transformers has no other for this model_type")
    raw.skip("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")
    config = with_rotary(raw, read_llama_config(raw, has_rotary=False), fraction=0.25)
    config = replace(config, qk_norm="head", norm_weight_offset=1.0, attention_gate="sigmoid")
    kinds = raw.strings("layer_types", _KINDS, length=config.num_layers)
    interval = raw.size("full_attention_interval", default=4)
    delta = _read_delta(raw)

    def layer_of(number: int, layer: LayerConfig) -> LayerConfig:
        is_linear = (number + 1) % interval > 0 if kinds is None else kinds[number] == "linear_attention"
        return LayerConfig(0, 0, 0, 1.0, layer.ffn_size, recurrence=delta) if is_linear else layer

    return replace(config, layers=tuple(layer_of(i, layer) for i, layer in enumerate(config.layers)))


def _read_delta(raw: RawConfig) -> GatedDelta:
    num_key_heads = raw.size("linear_num_key_heads", default=16)
    num_value_heads = raw.size("linear_num_value_heads", default=32)
    if num_value_heads % num_key_heads:
        raise raw.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_key_heads})")
    return GatedDelta(
        num_key_heads,
        num_value_heads,
        key_size=raw.size("linear_key_head_dim", default=128, limit=MAX_WIDTH),
        value_size=raw.size("linear_value_head_dim", default=128, limit=MAX_WIDTH),
        conv_size=raw.size("linear_conv_kernel_dim", default=4, limit=_MAX_CONV_SIZE),
        tiled=raw.boolean(TILED, default=False),
    )


def qwen3_5_sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors but those of experts."""
    return with_attention(_others(config), config)


def with_attention(found: dict[str, Source], config: ModelConfig) -> dict[str, Source]:
    """Return `found` with queries, keys, values and gates; a query head and its gate lie side by side in the file."""
    orders = {layer: _gated_orders(layer) for layer in config.distinct_layers}
    for number, layer in enumerate(config.layers):
        if layer.recurrence is not None:
            continue
        block, stored = f"blocks.{number}.", _ATTENTION.format(number)
        queries = (f"{stored}q_proj", 2 * layer.q_size)
        of_qkv, of_gates = orders[layer]
        parts = [queries, (f"{stored}k_proj", layer.kv_size), (f"{stored}v_proj", layer.kv_size)]
        hidden = config.hidden_size
        found |= layout.linear(f"{block}qkv", parts, hidden, bias=False, row_order=of_qkv)
        found |= layout.linear(f"{block}attn_gate", [queries], hidden, bias=False, row_order=of_gates)
    return layout.in_order(found)


def _gated_orders(layer: LayerConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the row orders of queries, keys and values, and of gates: each follows the query of its head."""
    size, num = layer.head_size, 2 * layer.q_size
    heads = range(0, num, 2 * size) if num else ()
    of_queries, of_gates = (tuple(head + start + i for head in heads for i in range(size)) for start in (0, size))
    return (*of_queries, *range(num, num + 2 * layer.kv_size)), of_gates


OF_LATER_TOKENS = rf"{IGNORED}|mtp\..*"
QWEN3_5 = Family(
    "qwen3_5_text", read_qwen3_5_config, qwen3_5_sources, ignored=OF_LATER_TOKENS, models="Qwen3.5, its text"
)
