"""How much memory a model and its KV cache need, how much there is, and how many blocks fit.

Torch-free: it knows a model's shape and which types of weights this CPU multiplies fast, and allocates nothing.
ModelRunner calls `plan_cache` once; `gptserve inspect` prints sizes before any weight is read.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import EngineConfig, Quantization, WeightType
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.kv_rows import row_size
from gptserve.engine.runner.control_groups import group_memory_bytes
from gptserve.weights.config import Experts, LinearAttention, ModelConfig
from gptserve.weights.families import find_family
from gptserve.weights.quantized import held_shapes
from gptserve.weights.quantized.coded import SUPER_GROUP, AnyFormat, CodeFormat
from gptserve.weights.quantized.stored_type import StoredType
from gptserve.weights.sharding import WHOLE, Share

_CONTEXTS_PER_SEQUENCE = 2
"""The default cache holds at most this many full contexts for each of max_num_seqs sequences: one to compute with, one
for prefixes of ended requests. Without a limit, the cache of a tiny model would take memory it never uses."""

CPU_MEMORY_SHARE = 0.4
"""The default cache on a CPU takes at most this share of the memory that is free once the weights are loaded. The
rest is the operating system's file cache, activations and other processes. It is less than half because of these: what
a server has reserved counts as free until it is used, and two that start together reserve the same memory."""

_MIN_CONTEXT = 2
"""One prompt token and one generated token."""

_OF_HEADS = (
    *("memory_in", "memory_gate", "memory_rates", "memory_conv", "memory_decay", "memory_step", "memory_skip"),
    "memory_out",
)
_OF_CONVOLUTION = ("conv_in", "conv_factors", "conv_out")
_AROUND_LAYERS = ("side_in", "side_out", "stream_in", "stream_out")
_PARTS = {
    "embedding": ("embed", "embed_in", "input_embed"),
    "position": ("position",),
    "attention": ("qkv", "attn_gate", "attn_out", "sinks", *_OF_HEADS, *_OF_CONVOLUTION),
    "feed-forward": ("ffn_up", "ffn_down", "xielu", "router", "correction", "factors"),
    "layer inputs": ("input_proj", "input_gate", "input_out"),
    "streams": (*_AROUND_LAYERS, "stream_router", "stream_predict", "stream_correct", "stream_scale"),
    "norms": ("scale",),  # and all tensors named ..._norm
    "head": ("head", "embed_out"),
}
"""The canonical tensors of each part (weights/families/family.py names them)."""
_OF_LAYERS = ("attention", "feed-forward", "layer inputs", "streams")
"""The parts with linears of layers."""

_QUANTIZED = (
    *("qkv", "attn_gate", "attn_out", "memory_in", "memory_gate", "memory_out", "conv_in", "conv_out"),
    *("ffn_up", "ffn_down"),
    *("input_embed", "input_proj", "input_gate", "input_out", "embed_in", "embed_out", "head"),
    *_AROUND_LAYERS,
)
"""The weights that a quantization changes."""

logger = logging.getLogger(__name__)


def parameter_counts(model: ModelConfig, share: Share = WHOLE) -> dict[str, int]:
    """Return the number of parameters of a rank by part, in the order they are used; a tied head counts nothing.

    They are those in the files, as published: of OPT's positions the first two rows count, which are never loaded.
    """
    counts = _no_parts(model)
    for part, _, shape in _tensors(model, share):
        counts[part] += math.prod(shape)
    for layer in share.of_config(model).layers:
        if layer.keys_are_values:  # in the files once
            counts["attention"] -= layer.kv_size * (model.hidden_size + model.qkv_bias)
    if counts["position"]:
        counts["position"] += model.position_offset * model.hidden_size
    return counts


def _no_parts(model: ModelConfig) -> dict[str, int]:
    """Return 0 for each part; inputs of layers and streams are one only where there are some."""
    has = {"layer inputs": model.layer_input_size, "streams": model.streams}
    return {part: 0 for part in _PARTS if has.get(part, True)}


def feed_forward_counts(model: ModelConfig) -> dict[Experts | None, int]:
    """Return the number of parameters of all layers' feed-forwards, by the experts that they have."""
    counts: dict[Experts | None, int] = {}
    for part, name, shape in _tensors(model):
        if part == "feed-forward":
            layer = model.layers[int(name.split(".")[1])]
            is_dense = layer.dense_size is not None and ".experts." not in name and ".router." not in name
            experts = None if is_dense else layer.experts
            counts[experts] = counts.get(experts, 0) + math.prod(shape)
    return counts


def weight_type_of(linear: str, quantization: Quantization | None, num_layers: int) -> WeightType | None:
    """Return what becomes of the weight of this linear, by its canonical name, here; None if it keeps its dtype.

    Where the errors of a feed-forward's last weight cost most, in the first and the last layers, int4 gives it 5 bits.
    """
    parts = linear.split(".")
    if quantization is None or parts[-1] not in _QUANTIZED:
        return None
    if quantization == "int8" or parts[0] != "blocks":
        return "int6" if quantization == "int4" and parts[-1] == "head" else "int8"
    if parts[-1] in ("input_gate", "input_out", *_AROUND_LAYERS):  # of few columns or rows, or in two layers alone
        return "int8"
    if parts[-1] == "ffn_down":
        number = int(parts[1])
        return "int5" if number < num_layers // 4 or number >= num_layers - num_layers // 3 else "int4"
    return "int5" if parts[-1] in ("qkv", "attn_out", "memory_in", "memory_out", "conv_in", "conv_out") else "int4"


def group_format(weight_type: WeightType, num_in: int) -> CodeFormat:
    """Return the codes of a weight with rows of num_in: of 4 and 5 bits with least values, and sub-scales if these fit.

    Codes of 6 bits always have sub-scales; if these do not fit, they are of 8 bits.
    """
    has_sub_scales = num_in % SUPER_GROUP == 0
    if weight_type == "int6" and has_sub_scales:
        return CodeFormat(6, "scales", 16)
    if weight_type in ("int6", "int8"):
        return CodeFormat(8, "scales")
    return CodeFormat(4 if weight_type == "int4" else 5, "scales and leasts", 32 if has_sub_scales else 0)


def keeps_codes(config: EngineConfig) -> bool:
    """Return whether an engine on a CPU multiplies with weights that are stored as codes as they are."""
    return config.quantization is None and config.tensor_parallel_size == 1 and native.is_available()


def codes_kept(model: ModelConfig, formats: Mapping[str, AnyFormat]) -> dict[str, AnyFormat]:
    """Return those of the weights that can come as codes which a CPU keeps so, by their canonical names.

    Codes of an embedding are those of a tied head, by which tokens are embedded.
    """
    return {name: its for name, its in formats.items() if _is_quantized(model, name)}


def weights_quantized(model: ModelConfig) -> list[str]:
    """Return the weights that a quantization changes, by their canonical names."""
    return [name for _, name, _ in _tensors(model) if _is_quantized(model, name)]


def _is_quantized(model: ModelConfig, name: str) -> bool:
    linear, _, kind = name.rpartition(".")
    names = (*_QUANTIZED, "embed") if model.tied_head else _QUANTIZED
    return kind == "weight" and linear.rpartition(".")[2] in names


def weight_types(quantization: Quantization | None) -> tuple[WeightType | None, ...]:
    """Return what becomes of some weight here; None for its dtype, which the router of a mixture of experts keeps."""
    if quantization is None:
        return (None,)
    return ("int8", None) if quantization == "int8" else ("int4", "int5", "int6", "int8", None)


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A tensor of a model as a rank holds it. `read_bytes` is what a step of one token reads of it, on average."""

    part: str
    name: str
    """Canonical."""
    type: str | None
    """What products compute with: a WeightType, or the name of the stored type that is kept; None: the dtype."""
    num_bytes: int
    read_bytes: int


def weight_bytes(
    model: ModelConfig,
    dtype_bytes: int,
    quantization: Quantization | None = None,
    share: Share = WHOLE,
    kept: StoredType | None = None,
    codes: Mapping[str, AnyFormat] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the bytes of a rank's parameters by part, as `held_weights` has them."""
    sizes = _no_parts(model)
    for held in held_weights(model, dtype_bytes, quantization, share, kept, codes):
        sizes[held.part] += held.num_bytes
    return sizes


def held_weights(
    model: ModelConfig,
    dtype_bytes: int,
    quantization: Quantization | None = None,
    share: Share = WHOLE,
    kept: StoredType | None = None,
    codes: Mapping[str, AnyFormat] = MappingProxyType({}),
) -> Iterator[HeldWeight]:
    """Yield a rank's tensors; the weight of a head that is tied comes last.

    `kept` is the stored type that a device keeps, if any; `codes` are what `codes_kept` returns. A tied head is the
    embedding, which is then quantized as a head if the model is, or in its codes. On a CPU without the compiled library
    it is a copy in --dtype unless it is quantized, which is not counted.
    """
    embedding: tuple[str | None, int] = None, 0
    for part, name, shape in _tensors(model, share):
        linear, weight_type = name.removesuffix(".weight"), None
        held = None if kept is None else held_shapes(name, shape, kept)
        if quantization is not None and linear != name:
            is_head = model.tied_head and linear == "embed"
            weight_type = weight_type_of("head" if is_head else linear, quantization, model.num_layers)
        if kept is not None and held is not None:
            its_type, num_bytes = kept.name, sum(map(math.prod, held.values()))
        elif name in codes:
            its_type, num_bytes = codes[name].name, codes[name].num_bytes(shape)
        elif weight_type is not None:
            its = group_format(weight_type, shape[1])
            its_type, num_bytes = f"int{its.bits}", its.num_bytes(shape)
        else:
            its_type, num_bytes = None, math.prod(shape) * dtype_bytes
        embedding = (its_type, num_bytes) if name == "embed.weight" else embedding
        yield HeldWeight(part, name, its_type, num_bytes, math.ceil(num_bytes * _share_read(model, name)))
    if model.tied_head and share.rank == 0:
        head_type, read_bytes = embedding
        yield HeldWeight("head", "head.weight", head_type, 0, read_bytes)


def _share_read(model: ModelConfig, name: str) -> float:
    """Return how much of a tensor a step of one token reads: a row of a table, the experts that are active."""
    if name in ("embed.weight", "position.weight", "input_embed.weight"):
        return 1 / (model.max_position if name.startswith("position") else model.vocab_size)
    experts = model.layers[int(name.split(".")[1])].experts if ".experts." in name else None
    return 1.0 if experts is None else experts.num_per_row / experts.num_all


def linear_bytes(
    model: ModelConfig,
    quantization: Quantization | None,
    dtype_bytes: int,
    codes: Mapping[str, AnyFormat] = MappingProxyType({}),
) -> int:
    """Return the bytes of the weights of layers and head, quantized or not, without padding.

    Those that are not quantized have dtype_bytes an element. `codes` are what `codes_kept` returns.
    """
    parts, num_bytes = {*_OF_LAYERS, "embedding" if model.tied_head else "head"}, 0
    for part, name, shape in _tensors(model):
        if name in codes:
            num_bytes += codes[name].num_bytes(shape)
        elif part in parts and name.endswith(".weight"):
            is_table = name == "input_embed.weight"
            linear = "head" if part == "embedding" and not is_table else name.removesuffix(".weight")
            weight_type = weight_type_of(linear, quantization, model.num_layers)
            if weight_type is None and not is_table:  # one of floats is not packed
                num_bytes += math.prod(shape) * dtype_bytes
            elif weight_type is not None:
                num_bytes += group_format(weight_type, shape[1]).num_bytes(shape)
    return num_bytes


def linear_shapes(model: ModelConfig) -> set[tuple[int, int]]:
    """Return the shapes (in, out) of the model's matrix products."""
    hidden, outer = model.hidden_size, model.embed_size or model.hidden_size
    shapes = {(outer, model.vocab_size), *([(outer, hidden), (hidden, outer)] if model.embed_size else [])}
    if width := model.layer_input_size:
        shapes |= {(hidden, model.num_layers * width), (hidden, width), (width, hidden)}
    if num := model.streams:
        shapes |= {(hidden, num), (hidden, hidden)}
    if rank := model.side_rank:
        shapes |= {(hidden, rank), (rank, hidden)}
    for layer in model.distinct_layers:
        recurrence = layer.recurrence
        if isinstance(recurrence, LinearAttention):
            shapes |= {(hidden, recurrence.conv_width), (hidden, recurrence.value_width)}
            shapes.add((hidden, recurrence.rate_width))
        elif recurrence is not None:
            shapes.add((hidden, recurrence.in_width))
        if recurrence is not None:
            shapes.add((recurrence.out_width, hidden))
        if layer.num_heads:
            shapes |= {(hidden, layer.qkv_size), (layer.q_size, hidden)}
        if model.attention_gate is not None and layer.num_heads:
            shapes.add((hidden, layer.num_heads if model.gates_heads else layer.q_size))
        for width in {layer.ffn_size, layer.dense_size or layer.ffn_size} - {0}:
            shapes |= {(hidden, width * (2 if model.gated_ffn else 1)), (width, hidden)}
        shapes |= {(hidden, layer.experts.num_logits)} if layer.experts else set()
    return shapes


def kv_bytes_per_token(model: ModelConfig, element_bytes: int) -> int:
    """Return the bytes the keys and values of one token take, over all layers that have their own.

    Elements of one byte are codes.
    """
    own = (layer for layer in model.layers if layer.kv_layer is None)
    row_sizes = (layer.num_kv_heads * row_size(layer.head_size, element_bytes) for layer in own)
    return 2 * sum(row_sizes) * element_bytes


def cache_capacity(
    model: ModelConfig, cache_bytes: int, element_bytes: int, block_size: int, max_model_len: int
) -> tuple[int, int, int]:
    """Return how many blocks, tokens and sequences of full context fit into `cache_bytes`."""
    num_blocks = max(0, cache_bytes) // (block_size * kv_bytes_per_token(model, element_bytes))
    blocks_per_sequence = -(-max_model_len // block_size)
    return num_blocks, num_blocks * block_size, num_blocks // blocks_per_sequence


def plan_cache(
    config: EngineConfig, model: ModelConfig, element_bytes: int, free_bytes: int, budget_bytes: int
) -> tuple[int, int]:
    """Return how many blocks, of elements of so many bytes, to allocate and max_model_len.

    num_blocks and kv_cache_bytes are used exactly as given, except that on a CPU the keys and the values of a layer may
    each take a huge page more (kv_cache.py). Without them the cache takes up to budget_bytes, at most
    _CONTEXTS_PER_SEQUENCE full contexts for each of max_num_seqs sequences. If the model's whole context does not fit,
    max_model_len is the longest that fits and a warning is logged, unless the configuration gives max_model_len.
    Raises InvalidConfigurationError if a given max_model_len does not fit, or a given size exceeds free_bytes.
    """
    block_bytes = config.block_size * kv_bytes_per_token(model, element_bytes)
    max_model_len = config.max_model_len or model.max_position
    needed = -(-max_model_len // config.block_size)
    num_blocks, source = _choose_num_blocks(config, free_bytes, budget_bytes, block_bytes, needed)
    if num_blocks >= needed:
        return num_blocks, max_model_len
    longest = num_blocks * config.block_size
    if config.max_model_len is None and longest >= _MIN_CONTEXT:
        logger.warning(
            "max_model_len is %d tokens instead of the model's context of %d, because %s; give the KV cache more "
            "memory for longer sequences",
            *(longest, max_model_len, source),
        )
        return num_blocks, longest
    shorter = f"lower max_model_len to {longest} or " if longest >= _MIN_CONTEXT else ""
    raise InvalidConfigurationError(
        f"the KV cache is too small for one sequence of max_model_len {max_model_len}: {source}, {needed} blocks "
        f"of {config.block_size} tokens ({needed * block_bytes:,} bytes) are needed; {shorter}give the cache more "
        "memory"
    )


def _tensors(model: ModelConfig, share: Share = WHOLE) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield each tensor's part, its canonical name, and its shape."""
    part_of = {tensor: part for part, tensors in _PARTS.items() for tensor in tensors}
    for name, source in share.of_sources(model, find_family(model.model_type).sources(model)).items():
        tensor = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        yield "norms" if tensor.endswith("_norm") else part_of[tensor], name, source.shape


def _choose_num_blocks(
    config: EngineConfig, free_bytes: int, budget_bytes: int, block_bytes: int, blocks_per_context: int
) -> tuple[int, str]:
    """Return the number of blocks and the reason for it, for messages."""
    if config.num_blocks is not None:
        num_blocks, wanted = config.num_blocks, config.num_blocks * block_bytes
        source, asked = f"num_blocks is {num_blocks}", f"num_blocks {num_blocks}"
    elif config.kv_cache_bytes is not None:
        num_blocks, wanted = config.kv_cache_bytes // block_bytes, config.kv_cache_bytes
        source, asked = f"{wanted:,} bytes hold {num_blocks} blocks", "kv_cache_bytes"
    else:
        num_blocks = min(budget_bytes // block_bytes, _CONTEXTS_PER_SEQUENCE * config.max_num_seqs * blocks_per_context)
        return num_blocks, f"{budget_bytes:,} bytes hold {num_blocks} blocks"
    if wanted > free_bytes:
        raise InvalidConfigurationError(
            f"{asked} asks for {wanted:,} bytes of KV cache, but only {free_bytes:,} bytes of memory are free"
        )
    return num_blocks, source


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes this process can take without swapping: the machine's, or its control groups' if these are less.

    `root` is where proc and sys are mounted.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except FileNotFoundError:  # not Linux: assume that half of the memory is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = group_memory_bytes(root)
    return available if limit is None else min(available, limit)


def check_max_model_len(config: EngineConfig, max_position: int) -> None:
    """Raise InvalidConfigurationError if max_model_len exceeds the model's context."""
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise InvalidConfigurationError(
            f"max_model_len must be at most the model's context of {max_position} tokens, got {config.max_model_len}"
        )
