"""The weights that a family expects, found among the tensors of the files: each in its stored type.

Checks every name, shape and dtype. Torch-free. checkpoint.py reads what is found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gptserve.weights.errors import InvalidCheckpointError, shown
from gptserve.weights.families.family import Family, Source
from gptserve.weights.quantized import type_of
from gptserve.weights.quantized.coded import AnyFormat, CodeFormat, gives_codes, joined_format
from gptserve.weights.quantized.stored_type import OF_CACHE, PLAIN, Expected, Found, StoredType, UnfitError
from gptserve.weights.stored_tensor import Shape, StoredTensor

NAMES_SHOWN = 3  # of each kind of fault: one wrong setting misshapes every layer alike


@dataclass(frozen=True, slots=True)
class Part:
    """A weight in the files, or a part of one that is joined of several.

    The shape is that in the file of plain floats, and [out, in] or [entries, out, in] otherwise.
    """

    type: StoredType
    shape: Shape
    tensors: dict[str, StoredTensor]
    """By the endings of their names, as the type has them."""


def find_parts(
    folder: Path,
    family: Family,
    sources: Mapping[str, Source],
    files: Mapping[str, StoredTensor],
    types: Sequence[StoredType],
) -> dict[str, Part]:
    """Return the parts of all sources by their names; `types` are those that they may have beside plain floats.

    Raises InvalidCheckpointError unless the files hold exactly these, in readable shapes and dtypes.
    """
    parts: dict[str, Part] = {}
    faults = _Faults()
    for source in sources.values():
        for weight, shape in source.parts:
            if weight in parts:
                continue
            found, (stored, its_shape) = Found.of(weight, files), stored_as(source, weight, shape, files, types)
            expected: dict[str, Expected] = {}
            try:
                expected = stored.tensors(its_shape, found)
            except UnfitError as fault:
                faults.unfit.append(f"{weight} is in {stored.name}, which {fault}, expected {list(shape)}")
            faults.compare(expected, found, stored)
            tensors = {ending: found[ending] for ending in expected if ending in found}
            parts[weight] = Part(stored, its_shape, tensors)
    if what := faults.describe(f"{family.ignored}|{OF_CACHE}" if types else family.ignored, files):
        raise InvalidCheckpointError(f"the tensors in {folder} do not fit its config.json: {what}")
    return parts


def turned_as_stored(sources: Mapping[str, Source], files: Mapping[str, StoredTensor]) -> dict[str, Source]:
    """Return the sources; tensors of all experts are not transposed that lie in the files as [experts, out, in].

    Qwen3-VL is published as [experts, in, out], but transformers saves what it computes with.
    """
    found = dict(sources)
    for name, source in sources.items():
        if source.entry is not None and source.transpose:
            turned = tuple((part, (*shape[:-2], shape[-1], shape[-2])) for part, shape in source.parts)
            if turned != source.parts and all(part in files and files[part].shape == its for part, its in turned):
                found[name] = replace(source, parts=turned, transpose=False)
    return found


def apart_as_stored(sources: Mapping[str, Source], files: Mapping[str, StoredTensor]) -> dict[str, Source]:
    """Return the sources; experts that are entries of one tensor are linears of their own where the files have those.

    Gemma 4 is published as one tensor; tools that quantize it write each expert apart, perhaps below `moe`. Qwen3-Next
    is published with a fused linear, of which GGUF files make two, with rows in canonical order.
    """
    linears = {name.rpartition(".")[0] for name in files}
    found = {name: _unfused(name, source, linears) for name, source in sources.items()}
    for name, source in sources.items():
        stem, _, kind = source.parts[0][0].rpartition(".")
        if source.entry is None or source.row_order is not None or kind not in _APART or source.parts[0][0] in files:
            continue
        num_in, num_out = source.joined_shape[::-1]
        for experts in (stem, f"{stem.removesuffix('experts')}moe.experts"):
            apart = [f"{experts}.{source.entry}.{part}" for part in _APART[kind]]
            if linears.issuperset(apart):
                found[name] = Source(tuple((f"{part}.weight", (num_out // len(apart), num_in)) for part in apart))
    return found


def _unfused(name: str, source: Source, linears: Collection[str]) -> Source:
    fused = source.parts[0][0]
    own = fused.replace(*_FUSED.get(name.split(".")[-2], ("", "")))
    return source if own == fused or own.rpartition(".")[0] not in linears else Source(((own, source.shape),))


_FUSED = {"memory_in": ("in_proj_qkvz", "in_proj_qkv"), "memory_gate": ("in_proj_qkvz", "in_proj_z")}
"""The names of a fused linear and of one with some of its rows, by the kind of tensor that has these."""
_APART = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What tensors of all experts have of each, one behind the other."""


def stored_as(
    source: Source, weight: str, shape: Shape, files: Mapping[str, StoredTensor], types: Sequence[StoredType]
) -> tuple[StoredType, Shape]:
    """Return the type of a source's part, and its shape as Part has it; `shape` is that of plain floats."""
    its_shape = (*shape[:-2], shape[-1], shape[-2]) if source.transpose else shape
    stored = type_of(weight, its_shape, files, types)
    return stored, shape if stored is PLAIN else its_shape


def find_code_formats(sources: Mapping[str, Source], parts: Mapping[str, Part]) -> dict[str, AnyFormat]:
    """Return the weights that can come as codes (quantized/coded.py), by their canonical names.

    The parts of a joined weight may have several formats.
    """
    found: dict[str, AnyFormat] = {}
    for name, source in sources.items():
        if name.endswith(".weight") and source.is_of_rows:
            formats = [_format_of(parts[part]) for part, _ in source.parts]
            if None in formats:
                continue
            rows = rows_of_parts(source)
            sizes = [0] * len(formats) if rows is None else map(len, rows)
            its = joined_format(list(zip(sizes, formats, strict=True)), in_order=rows is not None)
            if its is not None:
                found[name] = its
    return found


def rows_of_parts(source: Source) -> tuple[Sequence[int], ...] | None:
    """Return which rows of each part a weight has, numbered in the part; None if those of parts take turns."""
    sizes = [shape[-1] if source.transpose else shape[-2] for _, shape in source.parts]
    if source.row_order is None:
        return tuple(map(range, sizes))
    if len(sizes) == 1:
        return (source.row_order,)
    found, start, first = list[Sequence[int]](), 0, 0
    for size in sizes:
        end = start
        while end < len(source.row_order) and first <= source.row_order[end] < first + size:
            end += 1
        found.append([row - first for row in source.row_order[start:end]])
        start, first = end, first + size
    return tuple(found) if start == len(source.row_order) else None


def _format_of(part: Part) -> CodeFormat | None:
    """Return the format in which the rows of a part can come as codes, if any."""
    return part.type.code_format(part.shape[-2:], part.tensors) if gives_codes(part.type) else None


@dataclass
class _Faults:
    """What differs in the files from what is expected."""

    names: set[str] = field(default_factory=set)
    """That are expected, and there."""
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def compare(self, expected: Mapping[str, Expected], found: Found, stored: StoredType) -> None:
        """Note what is wrong with the tensors of one weight."""
        for ending, its in expected.items():
            name = found.base + ending
            if ending not in found:
                self.missing.append(name)
                continue
            self.names.add(name)
            tensor, shown_name = found[ending], name if stored is PLAIN else found[ending].name
            if tensor.shape != its.shape:
                self.misshapen.append(f"{shown_name} is {shown(list(tensor.shape))}, expected {list(its.shape)}")
            if tensor.dtype not in its.dtypes:
                self.mistyped.append(f"{shown_name} is {tensor.dtype}, expected one of {', '.join(its.dtypes)}")

    def describe(self, ignored: str, files: Mapping[str, StoredTensor]) -> str:
        """Return all faults in one line, nothing if there is none; names that fit the pattern `ignored` are none."""
        is_ignored = re.compile(ignored).fullmatch
        others = [
            shown(files[name].name)
            for name in files
            if not (name in self.names or is_ignored(name) or _is_idle_bias(name, files))
        ]
        unexpected = [] if self.unfit else others  # those may be of an unfit one
        misshapen = self.misshapen + self.unfit
        kinds = {"missing": self.missing, "unexpected": unexpected, "misshapen": misshapen, "mistyped": self.mistyped}
        return ", ".join(
            f"{len(names)} {kind} ({'; '.join(names[:NAMES_SHOWN])}{'; ...' if len(names) > NAMES_SHOWN else ''})"
            for kind, names in kinds.items()
            if names
        )


def _is_idle_bias(name: str, files: Mapping[str, StoredTensor]) -> bool:
    """Return whether this is a bias of zeros, which older GPTQ files have for linears without one."""
    base = name.removesuffix("bias")
    return name.endswith(".bias") and f"{base}qweight" in files and files[name].is_zero()
