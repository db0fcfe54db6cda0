"""gpt-oss: a mixture of experts with a clamped gate, attention sinks, every other layer with a window, YaRN.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from gptserve.weights.config import Experts, ModelConfig
from gptserve.weights.families import layout
from gptserve.weights.families.family import Family, RawConfig, Source, with_windows
from gptserve.weights.families.llama import ATTENTION, EMBED, END, IGNORED, NORMS, SINKS, read_llama_config

NAMES: layout.Names = {**EMBED, **NORMS, **ATTENTION, **SINKS, **END}
MAX_TENSORS = 2**16  # of experts, over all layers


DEFAULT_SCALING = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _read_config(raw: RawConfig) -> ModelConfig:
    raw.default(head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=150_000.0)
    if "rope_parameters" not in raw and "rope_scaling" not in raw:
        raw.default(rope_parameters=DEFAULT_SCALING, replaces_null=True)
    raw.forbid("swiglu_alpha", 1.702, "no published gpt-oss has another")
    config = with_windows(raw, read_llama_config(raw, attention_bias=True), lambda layer: layer % 2 == 0)
    num_experts = raw.size("num_local_experts", limit=max(1, MAX_TENSORS // config.num_layers))
    num_active = raw.size("num_experts_per_tok", limit=num_experts)
    experts = Experts(num_experts, num_active)
    return replace(
        config.change_layers(lambda layer: replace(layer, experts=experts)),
        attention_sinks=True,
        activation="gelu_sigmoid",
        ffn_limit=raw.positive("swiglu_limit", default=7.0),
        ffn_bias=True,
    )


def _sources(config: ModelConfig) -> dict[str, Source]:
    """Return all tensors; those of all experts are stored as one, [experts, in, out], and gates and up in turn."""
    sources = layout.decoder(NAMES)(config)
    for number, layer in enumerate(config.layers):
        hidden, ffn, experts = config.hidden_size, layer.ffn_size, layer.experts
        assert experts is not None
        gates_first = (*range(0, 2 * ffn, 2), *range(1, 2 * ffn, 2))
        linears = (("up", "gate_up_proj", hidden, 2 * ffn, gates_first), ("down", "down_proj", ffn, hidden, None))
        block, stored = f"blocks.{number}.", f"layers.{number}."
        sources |= layout.linear(f"{block}router", [(f"{stored}mlp.router", experts.num)], hidden, bias=True)
        for e, (kind, part, num_in, num_out, order) in product(range(experts.num), linears):
            name, its_name = f"{block}experts.{e}.ffn_{kind}", f"{stored}mlp.experts.{part}"
            weights, biases = (its_name, (experts.num, num_in, num_out)), (f"{its_name}_bias", (experts.num, num_out))
            sources[f"{name}.weight"] = Source((weights,), transpose=True, entry=e, row_order=order)
            sources[f"{name}.bias"] = Source((biases,), entry=e, row_order=order)
    return sources


GPT_OSS = Family(
    "gpt_oss",
    _read_config,
    _sources,
    ignored=IGNORED,
    models="gpt-oss",
)
