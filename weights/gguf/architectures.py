"""What a GGUF file says of its model, as the config.json and the names of tensors of the checkpoint it was made from.

A row of ARCHITECTURES is one of llama.cpp's: the model_type whose family reads it, and what its keys and names do not
have in common with all others. Sources: llama.cpp's gguf-py/gguf/constants.py and tensor_mapping.py, and its
conversion/. Torch-free. folder.py calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptserve.weights.errors import InvalidCheckpointError, InvalidConfigError, UnsupportedModelError, shown
from gptserve.weights.gguf.reader import Header
from gptserve.weights.gguf.rope import rope_fields
from gptserve.weights.stored_tensor import StoredTensor

Fields = dict[str, Any]

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
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
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_OUTER = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


class Keys:
    """The keys of an architecture. Readers raise InvalidConfigError naming the key."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self._architecture = header, architecture

    def get(self, name: str) -> object:
        """Return the value of {architecture}.{name}; None if there is none."""
        return self.header.keys.get(f"{self._architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> int | float:
        """Return a number, not one for each layer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fault(name, "a number")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1, not one for each layer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.fault(name, "an integer of at least 1")
        return value

    def fault(self, name: str, rule: str) -> InvalidConfigError:
        """Return the error for a key that must be `rule`."""
        value = self.get(name)
        found = "but is missing" if value is None else f"got {shown(value)}"
        return InvalidConfigError(f"{self.header.path}: {self._architecture}.{name} must be {rule}, {found}")

    def has(self, tensor: str) -> bool:
        """Return whether the file has this tensor."""
        return tensor in self.header.tensors


def _nothing(keys: Keys) -> Fields:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture are read."""

    model_type: str
    more: Callable[[Keys], Fields] = _nothing
    """The fields of config.json beside those that all have."""
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    layers: str = "model.layers"
    experts: Mapping[str, str] = field(default_factory=dict)
    """The tensors that have those of all experts, and the name of one, with {} for its number."""
    eps: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    """The name of the norms' epsilon in config.json, and in the file."""
    pairs_heads: bool = False
    """Rows of queries and keys are in pairs of neighbours."""
    adds_one: bool = False
    """Norms have one added."""


def _llama(keys: Keys) -> Fields:
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        "hidden_act": "silu",
    }


def _qwen2(keys: Keys) -> Fields:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(keys: Keys) -> Fields:
    return {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _mixtral(keys: Keys) -> Fields:
    return {
        "hidden_act": "silu",
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
    }


def _qwen3_moe(keys: Keys) -> Fields:
    return {
        **_qwen3(keys),
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(keys: Keys) -> Fields:
    return {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _silu(keys: Keys) -> Fields:
    return {"hidden_act": "silu", "attention_bias": False}


def _arcee(keys: Keys) -> Fields:
    return {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}


def _starcoder2(keys: Keys) -> Fields:
    # The window is that of all published ones, of which a file says nothing.
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": 4096}


def _phi3(keys: Keys) -> Fields:
    head_size = keys.size("attention.key_length", keys.size("embedding_length") // keys.size("attention.head_count"))
    num_rotated, context = keys.size("rope.dimension_count", head_size), keys.size("context_length")
    return {
        "hidden_act": "silu",
        "head_dim": head_size,
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", context),
        **({} if num_rotated == head_size else {"partial_rotary_factor": num_rotated / head_size}),
    }


def _scalar(keys: Keys, layers_of_largest: int) -> int:
    """Return what scores are divided by the root of: the head's size, but in the largest Gemmas the share of a head."""
    if keys.size("block_count") == layers_of_largest:
        return keys.size("embedding_length") // keys.size("attention.head_count")
    return keys.size("attention.key_length")


def _gemma2(keys: Keys) -> Fields:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scalar(keys, 46),
        "sliding_window": keys.size("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "attention_bias": False,
    }


def _gemma3(keys: Keys) -> Fields:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scalar(keys, 62),
        "sliding_window": keys.size("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "attention_bias": False,
    }


def _gpt2(keys: Keys) -> Fields:
    return {
        "n_embd": keys.size("embedding_length"),
        "n_layer": keys.size("block_count"),
        "n_head": keys.size("attention.head_count"),
        "n_inner": keys.size("feed_forward_length"),
        "n_positions": keys.size("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_MIXTRAL = "block_sparse_moe.experts.{}."
_QWEN3_MOE = "mlp.experts.{}."
_OLMO2 = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_WITH_NORMS_AROUND = _LAYER | _NORMS_AROUND

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, pairs_heads=True),
    "qwen2": Architecture("qwen2", _qwen2),
    "llama with experts": Architecture(
        "mixtral",
        _mixtral,
        layer=_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            "ffn_gate_exps": f"{_MIXTRAL}w1",
            "ffn_up_exps": f"{_MIXTRAL}w3",
            "ffn_down_exps": f"{_MIXTRAL}w2",
        },
        pairs_heads=True,
    ),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _qwen3_moe,
        layer=_LAYER | {"ffn_gate_inp": "mlp.gate"},
        experts={
            "ffn_gate_exps": f"{_QWEN3_MOE}gate_proj",
            "ffn_up_exps": f"{_QWEN3_MOE}up_proj",
            "ffn_down_exps": f"{_QWEN3_MOE}down_proj",
        },
    ),
    "smollm3": Architecture("smollm3", _silu, pairs_heads=True),
    "arcee": Architecture("arcee", _arcee, pairs_heads=True),
    "phi3": Architecture(
        "phi3", _phi3, layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "olmo2": Architecture("olmo2", _silu, layer=_LAYER | _OLMO2),
    "starcoder2": Architecture(
        "starcoder2",
        _starcoder2,
        layer=_LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        eps=("norm_epsilon", "attention.layer_norm_epsilon"),
    ),
    "gemma": Architecture("gemma", _gemma, adds_one=True),
    "gemma2": Architecture("gemma2", _gemma2, layer=_WITH_NORMS_AROUND, adds_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, layer=_WITH_NORMS_AROUND, adds_one=True),
    "gpt2": Architecture("gpt2", _gpt2, outer=_GPT2_OUTER, layer=_GPT2_LAYER, layers="h"),
}
MAX_TENSORS = 2**18
"""Each expert's counts."""
_UNREAD_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""What rope.py reads of them is in config.json."""
_OWN_SIZES = ("gpt2",)
"""Families whose sizes have names of their own."""


def architecture_of(header: Header) -> tuple[str, Architecture]:
    """Return the architecture of a file and its name. Raises UnsupportedModelError."""
    name = header.keys.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        names = ", ".join(sorted(its_name for its_name in ARCHITECTURES if " " not in its_name))
        raise UnsupportedModelError(
            f"{header.path}: general.architecture {shown(name)} is not supported; GGUF files of {names} are served"
        )
    variant = f"{name} with experts"
    has_experts = bool(header.keys.get(f"{name}.expert_count")) and variant in ARCHITECTURES
    return name, ARCHITECTURES[variant if has_experts else name]


def describe_config(header: Header) -> Fields:
    """Return config.json. Raises InvalidConfigError or UnsupportedModelError."""
    name, architecture = architecture_of(header)
    keys = Keys(header, name)
    if not keys.has("token_embd.weight"):
        raise InvalidCheckpointError(f"{header.path} must have the tensor token_embd.weight")
    fields: Fields = {
        "model_type": architecture.model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not keys.has("output.weight"),
        "quantization_config": {
            "quant_method": "gguf",
            "types": sorted({its.dtype for its in header.tensors.values()}),
        },
    }
    num_heads = keys.size("attention.head_count")
    num_kv_heads = keys.size("attention.head_count_kv", num_heads)
    if architecture.pairs_heads:
        fields["quantization_config"] |= {"paired_q_proj_heads": num_heads, "paired_k_proj_heads": num_kv_heads}
    if architecture.adds_one:
        fields["quantization_config"]["norms_have_one_added"] = True
    if architecture.model_type not in _OWN_SIZES:
        hidden_size = keys.size("embedding_length")
        fields |= {
            "hidden_size": hidden_size,
            "num_hidden_layers": keys.size("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": keys.size("attention.key_length", keys.size("rope.dimension_count", hidden_size // num_heads)),
            "intermediate_size": keys.size("feed_forward_length"),
            "max_position_embeddings": keys.size("context_length"),
            architecture.eps[0]: keys.number(architecture.eps[1]),
            **rope_fields(header, name),
        }
    return fields | architecture.more(keys)


def named_tensors(header: Header) -> dict[str, StoredTensor]:
    """Return the tensors by their names in the checkpoint; one without a name there keeps its own."""
    _, architecture = architecture_of(header)
    named: dict[str, StoredTensor] = {}
    for name, tensor in header.tensors.items():
        if name in _UNREAD_TENSORS:
            continue
        its_name = _checkpoint_name(name, architecture)
        if "{}" not in its_name:
            named[its_name] = tensor
            continue
        num, *shape = tensor.shape
        if len(named) + num > MAX_TENSORS:
            raise InvalidCheckpointError(f"{header.path} must have at most {MAX_TENSORS} tensors, got more experts")
        num_bytes = (tensor.end - tensor.start) // num
        for e in range(num):
            start = tensor.start + e * num_bytes
            one = replace(tensor, shape=tuple(shape), start=start, end=start + num_bytes)
            named[its_name.format(e)] = one
    return named


def _checkpoint_name(name: str, architecture: Architecture) -> str:
    stem, _, kind = name.rpartition(".")
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found is not None and found[2] in architecture.experts:
        return f"{architecture.layers}.{found[1]}.{architecture.experts[found[2]]}.{kind}"
    if found is not None and found[2] in architecture.layer:
        return f"{architecture.layers}.{found[1]}.{architecture.layer[found[2]]}.{kind}"
    return f"{architecture.outer[stem]}.{kind}" if stem in architecture.outer else name
