"""What a GGUF file says of its model, as the config.json and the names of tensors of the checkpoint it was made from.

Torch-free. folder.py calls it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gptserve.weights.errors import InvalidCheckpointError, UnsupportedModelError, shown
from gptserve.weights.gguf.architecture import Architecture
from gptserve.weights.gguf.dense import DENSE
from gptserve.weights.gguf.gemma3n import GEMMA3N
from gptserve.weights.gguf.gemma4 import GEMMA4
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.lfm2 import LFM2
from gptserve.weights.gguf.mamba import MAMBA
from gptserve.weights.gguf.mixtures import MIXTURES
from gptserve.weights.gguf.qwen import QWEN
from gptserve.weights.gguf.reader import Header
from gptserve.weights.gguf.refused import why_refused
from gptserve.weights.gguf.rope import head_size, rope_fields
from gptserve.weights.stored_tensor import StoredTensor

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **MIXTURES, **GEMMA3N, **GEMMA4, **LFM2, **MAMBA, **QWEN}
"""By general.architecture; some have variants."""
_VARIANTS = {
    "experts": "expert_count",
    "shared experts": "expert_shared_feed_forward_length",
    "windows": "attention.sliding_window",
    "temperatures": "attention.temperature_scale",
}
"""The keys that files of a variant have."""
_NORM_OF_VARIANT = "blk.0.attn_norm_2.weight"
_WITHOUT_KIND = {".exp_probs_b": "bias", **dict.fromkeys((".ffn_norm", ".ssm_a", ".ssm_d"), "weight")}
"""What files of Hy3, of Qwen3.5 and of Mamba name without its kind."""
MAX_TENSORS = 2**18
"""Each expert's counts."""
_UNREAD_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""What rope.py reads of them is in config.json."""


def architecture_of(header: Header) -> tuple[str, Architecture]:
    """Return the architecture of a file and its name. Raises UnsupportedModelError."""
    name = header.keys.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES or " " in name:
        names = ", ".join(sorted(its_name for its_name in ARCHITECTURES if " " not in its_name))
        why = why_refused(str(name))
        told = f"{shown(name)} is not supported{'' if why is None else f': it {why}'}"
        raise UnsupportedModelError(f"{header.path}: general.architecture {told}; GGUF files of {names} are served")
    kinds = [kind for kind, key in _VARIANTS.items() if header.keys.get(f"{name}.{key}")]
    for kind in kinds + ["norms"] * (_NORM_OF_VARIANT in header.tensors):
        if f"{name} with {kind}" in ARCHITECTURES:
            return name, ARCHITECTURES[f"{name} with {kind}"]
    return name, ARCHITECTURES[name]


def describe_config(header: Header) -> Fields:
    """Return config.json. Raises InvalidConfigError or UnsupportedModelError."""
    name, architecture = architecture_of(header)
    keys = Keys(header, name, layers_differ=architecture.layers_differ)
    if not keys.has("token_embd.weight"):
        raise InvalidCheckpointError(f"{header.path} must have the tensor token_embd.weight")
    fields: Fields = {
        "model_type": architecture.model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not keys.has("output.weight"),
        "quantization_config": _stored(header, keys, architecture),
    }
    sizes: Fields = {
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": head_size(keys),
        "intermediate_size": keys.size("feed_forward_length", _width_of_expert(keys)),
        "max_position_embeddings": keys.size("context_length"),
    }
    fields |= {architecture.sizes.get(its, its): size for its, size in sizes.items()}
    if len(set(keys.heads_of_layers)) > 1:
        fields["num_attention_heads_per_layer"] = keys.heads_of_layers
    if architecture.eps is not None:
        fields[architecture.eps[0]] = keys.number(architecture.eps[1])
    if architecture.has_rotary:
        fields |= rope_fields(keys)
    return fields | architecture.more(keys)


def _width_of_expert(keys: Keys) -> int | None:
    """Return what stands in for the width of a feed-forward in a file all of whose layers have experts."""
    return keys.count("expert_feed_forward_length", 0) or None


def named_tensors(header: Header) -> dict[str, StoredTensor]:
    """Return the tensors by their names in the checkpoint; one without a name there keeps its own."""
    name, architecture = architecture_of(header)
    named: dict[str, StoredTensor] = {}
    for its_name, tensor in _tensors(Keys(header, name, layers_differ=architecture.layers_differ), architecture):
        if len(named) >= MAX_TENSORS:
            raise InvalidCheckpointError(f"{header.path} must have at most {MAX_TENSORS} tensors, got more experts")
        named[its_name] = tensor
    return named


def _stored(header: Header, keys: Keys, architecture: Architecture) -> Fields:
    """Return the section of config.json that quantized/gguf.py reads."""
    stored: Fields = {"quant_method": "gguf", "types": sorted({its.dtype for its in header.tensors.values()})}
    if architecture.pairs_heads:
        stored |= {"paired_q_proj_heads": keys.num_heads, "paired_k_proj_heads": keys.num_kv_heads}
    if architecture.joins_heads:
        stored |= {"joined_heads": keys.num_heads, "joined_kv_heads": keys.num_kv_heads}
    if architecture.adds_one:
        stored["norms_have_one_added"] = True
    if architecture.has_decays:
        stored["has_decays"] = True
    return stored


def _tensors(keys: Keys, architecture: Architecture) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors by their names in the checkpoint, but those of layers behind the last one."""
    yield from _numbers(keys, architecture)
    num_layers = keys.num_layers if keys.get("nextn_predict_layers") else None
    for name, tensor in keys.header.tensors.items():
        if name in _UNREAD_TENSORS:
            continue
        kinds = (f".{kind}" for ending, kind in _WITHOUT_KIND.items() if name.endswith(ending))
        stem, _, kind = f"{name}{next(kinds, '')}".rpartition(".")
        found = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem)
        if found is None and stem in architecture.stacks:
            whole = f"{architecture.stacks[stem]}.{kind}"
            yield from _entries(keys, whole, tensor, tensor.shape[0], "streams")
            continue
        if found is None:
            yield f"{architecture.outer[stem]}.{kind}" if stem in architecture.outer else name, tensor
            continue
        if num_layers is not None and int(found[1]) >= num_layers:
            continue
        layer, part = f"{architecture.layers}.{found[1]}", found[2]
        older = re.fullmatch(r"(\w+)\.(\d+)", part)  # of one expert
        if older is not None and f"{older[1]}_exps" in architecture.experts:
            yield f"{layer}.{architecture.experts[f'{older[1]}_exps'].format(int(older[2]))}.{kind}", tensor
        elif part in architecture.experts:
            num = keys.size("expert_count")
            yield from _entries(keys, f"{layer}.{architecture.experts[part]}.{kind}", tensor, num, "experts")
        elif part in architecture.heads:
            num = keys.num_heads if part == "attn_q_norm" else keys.num_kv_heads
            yield from _entries(keys, f"{layer}.{architecture.heads[part]}.{kind}", tensor, num, "heads")
        elif part == "attn_qkv" and part not in architecture.layer and "attn_q" in architecture.layer:
            yield from _projections(keys, layer, architecture, kind, tensor)
        else:
            if f"{part}.{kind}" in architecture.rows and len(tensor.shape) == 1:
                tensor = replace(tensor, shape=(1, *tensor.shape))
            if f"{part}.{kind}" in architecture.channels and len(tensor.shape) == 2:
                tensor = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
            if f"{part}.{kind}" in architecture.vectors:
                tensor = replace(tensor, shape=(math.prod(tensor.shape),))
            yield _name(layer, part, kind, architecture) or name, tensor


def _numbers(keys: Keys, architecture: Architecture) -> Iterator[tuple[str, StoredTensor]]:
    header, num_layers = keys.header, keys.num_layers
    for key, part in architecture.numbers.items():
        stored = header.vectors.get(key)
        if stored is None or stored.shape != (num_layers,):
            found = "but is missing" if key not in header.keys else f"got {shown(header.keys[key])}"
            raise InvalidCheckpointError(
                f"{header.path}: {key} must be an array of {num_layers} numbers in F32, {found}"
            )
        for number in range(num_layers):
            yield f"{architecture.layers}.{number}.{part}", replace(stored.entry(number), shape=(1,))


def _name(layer: str, part: str, kind: str, architecture: Architecture) -> str | None:
    if whole := architecture.layer.get(f"{part}.{kind}"):
        return f"{layer}.{whole}"
    return f"{layer}.{architecture.layer[part]}.{kind}" if part in architecture.layer else None


def _entries(keys: Keys, name: str, tensor: StoredTensor, num: int, of_what: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each of `num` parts of a tensor; the name has {} for its number."""
    if tensor.shape[0] != num:
        raise InvalidCheckpointError(
            f"{keys.header.path}: tensor {tensor.name} must have {num} {of_what}, got {tensor.shape[0]}"
        )
    for e in range(num):
        yield name.format(e), tensor.entry(e)


def _projections(
    keys: Keys, layer: str, architecture: Architecture, kind: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield queries, keys and values of a tensor that has the rows of all."""
    sizes = [num * head_size(keys) for num in (keys.num_heads, keys.num_kv_heads, keys.num_kv_heads)]
    if tensor.shape[0] != sum(sizes):
        raise InvalidCheckpointError(
            f"{keys.header.path}: tensor {tensor.name} must have {sum(sizes)} rows, got {tensor.shape[0]}"
        )
    row, num_bytes = 0, (tensor.end - tensor.start) // tensor.shape[0]
    for part, size in zip(("attn_q", "attn_k", "attn_v"), sizes, strict=True):
        start = tensor.start + row * num_bytes
        rows = replace(tensor, shape=(size, *tensor.shape[1:]), start=start, end=start + size * num_bytes)
        yield f"{layer}.{architecture.layer[part]}.{kind}", rows
        row += size
