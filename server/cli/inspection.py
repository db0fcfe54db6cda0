"""The report of `gptserve inspect`: parameters, bytes, KV cache, what fits, what is stored and what is computed with.

It needs config.json alone, but for what is stored, which the headers of the files say. engine/runner/memory.py does the
arithmetic. Reads no weights and does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gptserve.engine.config import Quantization
from gptserve.engine.runner.memory import (
    CPU_MEMORY_SHARE,
    HeldWeight,
    available_memory_bytes,
    cache_capacity,
    codes_kept,
    held_weights,
    kv_bytes_per_token,
    parameter_counts,
    weight_bytes,
)
from gptserve.engine.runner.state_memory import state_bytes
from gptserve.weights.config import ModelConfig
from gptserve.weights.families import load_config, read_raw_config
from gptserve.weights.inventory import StoredPart, code_formats, has_weights, stored_parts
from gptserve.weights.quantized import stored_types
from gptserve.weights.quantized.coded import AnyFormat, merged_names
from gptserve.weights.quantized.stored_type import PackedType, StoredType
from gptserve.weights.sharding import Share
from gptserve.weights.source import model_name, resolve_config

TYPES: dict[str, tuple[int, Quantization | None]] = {
    "float32": (4, None),
    "bfloat16": (2, None),
    "int8": (2, "int8"),
    "int4": (2, "int4"),
}
"""The columns: bytes of a number, and the quantization of weights, which is `--quantization` in bfloat16."""

AS_STORED = "as stored"
"""The column of a CPU that multiplies with codes as they are stored; the other weights are in bfloat16."""

_ROWS = {
    "embedding": ("embed", "embed_in", "input_embed"),
    "position": ("position",),
    "attention q, k, v": ("qkv", "memory_in", "conv_in"),
    "attention out": ("attn_gate", "attn_out", "sinks", "memory_gate", "memory_out", "conv_out"),
    "states": ("memory_rates", "memory_conv", "memory_decay", "memory_step", "memory_skip", "conv_factors"),
    "feed-forward": ("ffn_up", "ffn_down", "xielu"),
    "router": ("router", "correction", "factors"),
    "experts": (),  # the feed-forwards below blocks.{i}.experts
    "layer inputs": ("input_proj", "input_gate", "input_out"),
    "streams": (
        *("side_in", "side_out", "stream_in", "stream_out"),
        *("stream_router", "stream_predict", "stream_correct", "stream_scale"),
    ),
    "norms": ("scale",),  # and all tensors named ..._norm
    "head": ("head", "embed_out"),
}
"""The canonical tensors of each row of what is stored and computed with."""
_APART = "qkv"
"""The letters of the parts that some files have apart."""

_SHARE_SHOWN = 0.02
"""Types of less of a row's bytes are not named in the table: biases."""


@dataclass(frozen=True, slots=True)
class StoredReport:
    """How the files hold a row of tensors: the bytes of each stored type. `part` is a row, or "attention q" and so on.

    bits_per_weight counts scales and zeros.
    """

    part: str
    type_bytes: dict[str, int]
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class ComputedReport:
    """What products compute a row of tensors with: the bytes of each type in memory.

    bytes_per_token is what a step of one sequence reads of them.
    """

    part: str
    type_bytes: dict[str, int]
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class DTypeReport:
    """The part of the report that depends on the data type: bytes, and what fits beside the weights."""

    dtype: str
    part_bytes: dict[str, int]
    weights_bytes: int
    other_rank_weights_bytes: int | None
    kv_bytes_per_token: int
    num_blocks: int
    num_tokens: int
    num_full_sequences: int
    computed_with: tuple[ComputedReport, ...]
    weight_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The needs of one model, and what fits into memory_bytes; of its first rank, if it is split among several.

    stored_types names how the files hold the quantized weights, if any are. `stored` is of the whole model, and empty
    where there are no files of weights.

    The other ranks hold no embedding and no head.
    """

    model: str
    model_type: str
    stored_types: tuple[str, ...]
    tensor_parallel_size: int
    parameters: dict[str, int]
    num_parameters: int
    tied_head: bool
    num_layers: int
    num_kv_layers: int
    """Those that have keys and values of their own."""
    num_kv_heads: int | None
    head_size: int | None
    """These two are None where layers differ in one of them."""
    max_model_len: int
    block_size: int
    memory_bytes: int
    by_dtype: tuple[DTypeReport, ...]
    int8_kv_bytes_per_token: int
    """With `--kv-cache-dtype int8`, whatever the weights are."""
    state_bytes: int
    """What each sequence keeps beside keys and values."""
    stored: tuple[StoredReport, ...]


def inspect_folder(
    model: str | None, revision: str | None, memory_bytes: int | None, block_size: int, num_ranks: int, *, strict: bool
) -> ModelReport:
    """Make the report of a model by its name, as `inspect_model` does; `strict` refuses unknown keys of config.json.

    Raises WeightsError.
    """
    folder = resolve_config(model, revision)
    config = load_config(folder, "refuse" if strict else "warn")
    types = stored_types(read_raw_config(folder), folder)
    has_files = has_weights(folder)
    stored = stored_parts(folder, config) if has_files else ()
    codes = codes_kept(config, code_formats(folder, config)) if has_files else {}
    return inspect_model(model_name(model), config, memory_bytes, block_size, num_ranks, types, stored, codes)


def inspect_model(
    name: str,
    whole: ModelConfig,
    memory_bytes: int | None,
    block_size: int,
    num_ranks: int = 1,
    types: Sequence[StoredType] = (),
    stored: Iterable[StoredPart] = (),
    codes: Mapping[str, AnyFormat] = MappingProxyType({}),
) -> ModelReport:
    """Make the report; memory_bytes, of each rank, is by default its share of this machine's free memory.

    `types` are those of the quantized weights in the files. One that a GPU keeps has a column of its own, whose other
    weights are in bfloat16; so have the weights that a CPU keeps as codes, `codes`.

    Raises UnsupportedModelError if the model cannot be split among so many ranks.
    """
    memory_bytes = available_memory_bytes() // num_ranks if memory_bytes is None else memory_bytes
    parts_stored = _stored(stored)
    held = {name for part in parts_stored for name in part.type_bytes}
    share = Share(0, num_ranks)
    model = share.of_config(whole)
    parameters = parameter_counts(whole, share)
    num_parameters = sum(parameters.values())
    by_dtype = []
    columns: list[tuple[str, int, Quantization | None, StoredType | None, Mapping[str, AnyFormat]]] = [
        (dtype, *column, None, {}) for dtype, column in TYPES.items() if column[1] is None or num_ranks == 1
    ]  # those that are quantized are not split
    if whole.has_experts:
        columns += [(kept.name.lower(), 2, None, kept, {}) for kept in types if isinstance(kept, PackedType)]
    if codes and num_ranks == 1:
        columns.append((AS_STORED, 2, None, None, codes))
    for dtype, num_bytes, quantization, kept, its_codes in columns:
        parts = weight_bytes(whole, num_bytes, quantization, share, kept, its_codes)
        total = sum(parts.values())
        of_other = Share(1, num_ranks)
        others = sum(weight_bytes(whole, num_bytes, quantization, of_other, kept).values()) if num_ranks > 1 else None
        fits = cache_capacity(model, memory_bytes - total, num_bytes, block_size, model.max_position)
        computed = _computed(dtype, held_weights(whole, num_bytes, quantization, share, kept, its_codes))
        num_read = sum(entry.bytes_per_token for entry in computed)
        kv_bytes = kv_bytes_per_token(model, num_bytes)
        by_dtype.append(DTypeReport(dtype, parts, total, others, kv_bytes, *fits, computed, num_read))
    with_keys = [layer for layer in model.layers if layer.num_heads]
    kv_shapes = {(layer.num_kv_heads, layer.head_size) for layer in with_keys}
    num_kv_heads, head_size = kv_shapes.pop() if len(kv_shapes) == 1 else (None, None)
    return ModelReport(
        model=name,
        model_type=model.model_type,
        stored_types=tuple(name for name in dict.fromkeys(its.name for its in types) if not held or name in held),
        tensor_parallel_size=num_ranks,
        parameters=parameters,
        num_parameters=num_parameters,
        tied_head=model.tied_head,
        num_layers=model.num_layers,
        num_kv_layers=sum(layer.kv_layer is None for layer in with_keys),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=model.max_position,
        block_size=block_size,
        memory_bytes=memory_bytes,
        by_dtype=tuple(by_dtype),
        int8_kv_bytes_per_token=kv_bytes_per_token(model, 1),
        state_bytes=state_bytes(model),
        stored=parts_stored,
    )


def _row_of(canonical: str) -> str:
    """Return the row of a tensor."""
    tensor = canonical.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if tensor.endswith("_norm"):
        return "norms"
    if ".experts." in canonical:
        return "experts"
    return next(row for row, tensors in _ROWS.items() if tensor in tensors)


def _stored(parts: Iterable[StoredPart]) -> tuple[StoredReport, ...]:
    """Return the rows of what is stored, in the order of _ROWS; queries, keys and values as the files have them."""
    sizes: dict[str, dict[str, int]] = {}
    num_weights: dict[str, int] = {}
    for part in parts:
        row = _row_of(part.canonical)
        if part.num_parts == len(_APART) and row == "attention q, k, v":
            row = f"attention {_APART[part.number]}"
        of_row = sizes.setdefault(row, {})
        of_row[part.type] = of_row.get(part.type, 0) + part.num_bytes
        num_weights[row] = num_weights.get(row, 0) + part.num_weights
    order = list(_ROWS)
    order[2:3] = [order[2], *(f"attention {letter}" for letter in _APART)]
    return tuple(
        StoredReport(row, sizes[row], round(8 * sum(sizes[row].values()) / num_weights[row], 3))
        for row in order
        if row in sizes
    )


def _computed(dtype: str, weights: Iterable[HeldWeight]) -> tuple[ComputedReport, ...]:
    """Return the rows of what is computed with, in a column; `dtype` is its name."""
    plain = dtype if dtype in ("float32", "bfloat16") else "bfloat16"
    sizes: dict[str, dict[str, int]] = {}
    num_read: dict[str, int] = {}
    for held in weights:
        row, its_type = _row_of(held.name), plain if held.type is None else held.type
        of_row = sizes.setdefault(row, {})
        of_row[its_type] = of_row.get(its_type, 0) + held.num_bytes
        num_read[row] = num_read.get(row, 0) + held.read_bytes
    return tuple(ComputedReport(row, sizes[row], num_read[row]) for row in _ROWS if row in sizes)


def render(report: ModelReport) -> str:
    """Return the report as tables for a terminal."""
    types = [entry.dtype for entry in report.by_dtype]
    rank = "" if report.tensor_parallel_size == 1 else f", the first of {report.tensor_parallel_size} ranks"
    lines = [f"{report.model} ({report.model_type}){rank}"]
    if report.stored_types:
        how = "a column has what they are unpacked to, but for one of the same name"
        lines.append(f"quantized weights in the files: {', '.join(report.stored_types)}; {how}")
    lines += ["", _row("parameters", "number", *types)]
    for part, number in (report.parameters | {"total": report.num_parameters}).items():
        label = "head (the embedding)" if part == "head" and report.tied_head else part
        sizes = [_bytes((entry.part_bytes | {"total": entry.weights_bytes})[part]) for entry in report.by_dtype]
        lines.append(_row(label, f"{number:,}", *sizes))
    others = [entry.other_rank_weights_bytes for entry in report.by_dtype]
    if report.tensor_parallel_size > 1:
        lines.append(_row("each other rank", "", *(_bytes(number or 0) for number in others)))
    lines += [*_stored_lines(report), *_computed_lines(report)]
    lines += ["", _row("KV cache", "", *types)]
    rows = {
        "bytes a token": [f"{entry.kv_bytes_per_token:,}" for entry in report.by_dtype],
        f"blocks of {report.block_size}": [f"{entry.num_blocks:,}" for entry in report.by_dtype],
        "tokens": [f"{entry.num_tokens:,}" for entry in report.by_dtype],
        f"sequences of {report.max_model_len:,}": [f"{entry.num_full_sequences:,}" for entry in report.by_dtype],
    }
    lines += [_row(name, "", *values) for name, values in rows.items()]
    of_layers = f"{report.num_kv_layers} layers x {report.num_kv_heads} KV heads x {report.head_size} head size"
    if report.head_size is None:
        of_layers = f"the sum of KV heads x head size over {report.num_kv_layers} layers"
    lines += [
        "",
        f"bytes a token = 2 (key, value) x {of_layers} x bytes a number; with --kv-cache-dtype int8 they are "
        f"{report.int8_kv_bytes_per_token:,}",
        f"blocks, tokens, sequences: what {_bytes(report.memory_bytes)} hold beside the weights, without activations",
        f"on a CPU a server reserves at most {CPU_MEMORY_SHARE:.0%} of the memory that loading leaves free, unless "
        "--kv-cache-bytes says more; what is reserved is used only as the cache fills",
    ]
    if report.state_bytes:
        lines.append(f"each sequence keeps {_bytes(report.state_bytes)} of states beside them, however long it is")
    return "\n".join(lines)


def _stored_lines(report: ModelReport) -> list[str]:
    """Return the table of what the files hold; nothing without files."""
    if not report.stored:
        return []
    lines = ["", _row("in the files", "bits a weight", "bytes") + "  stored as"]
    for entry in report.stored:
        total = sum(entry.type_bytes.values())
        types = ", ".join(sorted(entry.type_bytes, key=lambda name: -entry.type_bytes[name]))
        lines.append(_row(entry.part, f"{entry.bits_per_weight:.2f}", _bytes(total)) + f"  {types}")
    whole = sum(sum(entry.type_bytes.values()) for entry in report.stored)
    return [*lines, _row("total", "", _bytes(whole))]


def _computed_lines(report: ModelReport) -> list[str]:
    """Return the tables of what each column computes with, and of what it reads for a token."""
    columns = [{row.part: row for row in entry.computed_with} for entry in report.by_dtype]
    types = [entry.dtype for entry in report.by_dtype]

    def table(title: str, cell: Callable[[ComputedReport], str]) -> list[str]:
        rows = [_row(part, "", *(cell(column[part]) for column in columns)) for part in columns[0]]
        return ["", _row(title, "", *types), *rows]

    def names(row: ComputedReport) -> str:
        most = max(row.type_bytes.values())
        held = [name for name, size in row.type_bytes.items() if size >= _SHARE_SHOWN * most]
        return ", ".join(merged_names(sorted(held, key=lambda name: -row.type_bytes[name])))

    totals = [_bytes(entry.weight_bytes_per_token) for entry in report.by_dtype]
    return [
        *table("computed with", names),
        *table("read for a token", lambda row: _bytes(row.bytes_per_token)),
        _row("total", "", *totals),
    ]


def _row(name: str, *cells: str) -> str:
    return f"  {name:<22}" + "".join(f"{cell:>16}" for cell in cells)


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} B"
