"""How files of one of llama.cpp's architectures are read: the row of a table, and the names most of them share.

dense.py, mixtures.py, gemma3n.py, gemma4.py, lfm2.py, mamba.py and qwen.py have the rows. Sources: llama.cpp's
gguf-py/gguf/constants.py and tensor_mapping.py, and its conversion/. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gptserve.weights.gguf.keys import Fields, Keys

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""What files of some architectures call the norm before the feed-forward."""
SINKS = {"attn_sinks.weight": "self_attn.sinks"}
LAYER_NORM = ("layer_norm_eps", "attention.layer_norm_epsilon")


def nothing(keys: Keys) -> Fields:
    """Return no fields."""
    return {}


def silu(keys: Keys) -> Fields:
    """Return the fields of a Llama that may have biases in its attention."""
    return {"hidden_act": "silu", "attention_bias": keys.has_attention_bias}


def llama(keys: Keys) -> Fields:
    """Return the fields of a Llama that may have biases."""
    return {**silu(keys), "mlp_bias": keys.has("blk.0.ffn_up.bias")}


def with_windows(keys: Keys, period: int, *, begins_full: bool = False) -> Fields:
    """Return the window, and which layers have it: for a file that does not say, as `Keys.layer_types` has it."""
    kinds = keys.layer_types(period, begins_full=begins_full)
    return {"sliding_window": keys.size("attention.sliding_window"), "layer_types": kinds}


def with_windows_if_any(keys: Keys, period: int, *, begins_full: bool = False) -> Fields:
    """Return the same of a file whose layers may all be without a window."""
    if not keys.get("attention.sliding_window"):
        return {"sliding_window": None, "layer_types": ["full_attention"] * keys.num_layers}
    return with_windows(keys, period, begins_full=begins_full)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture are read."""

    model_type: str
    more: Callable[[Keys], Fields] = nothing
    """The fields of config.json beside those that all have."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Names of sizes in config.json that differ from Llama's."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    """Parts of the names of tensors, with or without "weight" or "bias"."""
    layers: str = "model.layers"
    stacks: Mapping[str, str] = field(default_factory=dict)
    """The tensors outside of layers that have several, and the name of one, with {} for its number."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """The tensors that have those of all experts, and the name of one, with {} for its number."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """And those that have the vectors of all heads."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """The keys, with no architecture before them, that have a number for each layer, and the name of its tensor."""
    rows: tuple[str, ...] = ()
    """The tensors of a layer that are the only row of a matrix in the checkpoint."""
    channels: tuple[str, ...] = ()
    """And those of which each row is a matrix of one row there: the factors of a convolution."""
    vectors: tuple[str, ...] = ()
    """And those that are vectors there, and matrices in the file."""
    eps: tuple[str, str] | None = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    """The name of the norms' epsilon in config.json, and in the file; None: it is fixed."""
    has_rotary: bool = True
    pairs_heads: bool = False
    """Rows of queries and keys are in pairs of neighbours."""
    joins_heads: bool = False
    """Rows of all queries, then of all keys, then of all values, which the checkpoint has head by head."""
    layers_differ: bool = False
    """Layers may have other heads and widths: `more` replaces what config.json has of the first one."""
    adds_one: bool = False
    """Norms have one added."""
    has_decays: bool = False
    """Decays are minus e to the power of what they were, and norms of linear attention have none added."""
