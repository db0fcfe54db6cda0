"""Qwen3.5 with experts, and Qwen3-Next: its layers with the mixtures of Qwen2, of many small experts.

Qwen Team, "Qwen3-Next" (2025), "Qwen3.5" (2026).
"""

from __future__ import annotations

from gptserve.weights.config import Experts, GatedDelta, ModelConfig, Router
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, Family, RawConfig, Source
from gptserve.weights.families.mixtures import read_num_experts, with_mixtures
from gptserve.weights.families.qwen3_5 import (
    DELTA,
    NAMES,
    OF_LATER_TOKENS,
    qwen3_5_sources,
    read_qwen3_5_config,
    with_attention,
)
from gptserve.weights.families.qwen_moe import SHARED, mixing_layers

_FUSED = ("blocks.{}.memory_in", "blocks.{}.memory_gate", "blocks.{}.memory_rates")
_next_others = layout.decoder({name: stored for name, stored in NAMES.items() if name not in _FUSED})


def _read_qwen3_5(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=2)
    raw.default(intermediate_size=1, replaces_null=True)  # no layer has that
    raw.forbid("mlp_only_layers", [], "transformers has no other for this model_type")
    raw.forbid("norm_topk_prob", True, "transformers has no other for this model_type")
    config = read_qwen3_5_config(raw)
    return with_mixtures(config, *_read_experts(raw, config, num=256, num_active=8), lambda layer: True)


def _read_next(raw: RawConfig) -> ModelConfig:
    raw.default(num_key_value_heads=2)
    config = read_qwen3_5_config(raw)
    return with_mixtures(config, *_read_experts(raw, config, num=512, num_active=10), mixing_layers(raw))


def _read_experts(raw: RawConfig, config: ModelConfig, *, num: int, num_active: int) -> tuple[Experts, int]:
    """Return the mixture and the width of an expert; `num` and `num_active` are for a file that does not say."""
    num = read_num_experts(raw, ("num_experts",), config.num_layers, num)
    width = raw.size("moe_intermediate_size", default=512, limit=MAX_WIDTH)
    shared_width = raw.size("shared_expert_intermediate_size", default=512, limit=MAX_WIDTH)
    if shared_width % width:
        raise raw.error("shared_expert_intermediate_size", f"a multiple of moe_intermediate_size ({width})")
    num_active = raw.size("num_experts_per_tok", default=num_active, limit=num)
    router = Router(renormalised=raw.boolean("norm_topk_prob", default=True))
    return Experts(num, num_active, router, num_shared=shared_width // width, has_shared_gate=True), width


def _qwen3_5_sources(config: ModelConfig) -> dict[str, Source]:
    return _with_experts(qwen3_5_sources(config), config)


def _next_sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors; queries, keys, values and gates of each key head lie together in the file, as rates do."""
    found = with_attention(_next_others(config), config)
    for number, layer in enumerate(config.layers):
        delta = layer.recurrence
        if not isinstance(delta, GatedDelta):
            continue
        block, stored = f"blocks.{number}.memory_", DELTA.format(number)
        num, hidden = delta.num_value_heads // delta.num_key_heads, config.hidden_size
        values = num * delta.value_size
        *inputs, gates = _parts_of_heads(delta, (delta.key_size, delta.key_size, values, values))
        rates = [row for part in _parts_of_heads(delta, (num, num)) for row in part]
        fused = [(f"{stored}in_proj_qkvz", delta.conv_width + delta.value_width)]
        in_order = tuple(row for part in inputs for row in part)
        found |= layout.linear(f"{block}in", fused, hidden, bias=False, row_order=in_order)
        found |= layout.linear(f"{block}gate", fused, hidden, bias=False, row_order=tuple(gates))
        fused = [(f"{stored}in_proj_ba", 2 * delta.num_value_heads)]
        found |= layout.linear(f"{block}rates", fused, hidden, bias=False, row_order=tuple(rates))
    return _with_experts(found, config)


def _parts_of_heads(delta: GatedDelta, sizes: tuple[int, ...]) -> list[list[int]]:
    """Return the rows of each part, which a matrix has key head by key head in these sizes."""
    width, parts, start = sum(sizes), list[list[int]](), 0
    for size in sizes:
        parts.append([head * width + start + row for head in range(delta.num_key_heads) for row in range(size)])
        start += size
    return parts


def _with_experts(found: dict[str, Source], config: ModelConfig) -> dict[str, Source]:
    """Return `found` with the mixtures; those of all experts of a layer are one, [experts, out, in], gates first.

    weights/parts.py reads files that have each expert apart.
    """
    for number, layer in enumerate(config.layers):
        if layer.experts is None:
            continue
        num, hidden, ffn = layer.experts.num, config.hidden_size, layer.ffn_size
        block, stored = f"blocks.{number}.", f"layers.{number}.mlp."
        rows = [(f"{stored}gate", num), (SHARED.gate.format(number), 1)]
        found |= layout.linear(f"{block}router", rows, hidden, bias=False)
        found |= layout.joined_experts(number, num, f"{stored}experts.", hidden, ffn)
        found |= layout.shared_experts(SHARED, number, layer, hidden)
    return layout.in_order(found)


QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    _read_qwen3_5,
    _qwen3_5_sources,
    ignored=OF_LATER_TOKENS,
    models="Qwen3.5 with experts",
)
QWEN3_NEXT = Family(
    "qwen3_next", _read_next, _next_sources, ignored=OF_LATER_TOKENS, models="Qwen3-Next, Qwen3-Coder-Next"
)
