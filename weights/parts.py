"""The weights that a family expects, found among the tensors of the files: each in its stored type.

Checks every name, shape and dtype. Torch-free. checkpoint.py reads what is found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gptserve.weights.errors import InvalidCheckpointError, shown
from gptserve.weights.families.family import Family, Source
from gptserve.weights.quantized.stored_type import PLAIN, StoredType, UnfitError
from gptserve.weights.stored_tensor import Shape, StoredTensor

NAMES_SHOWN = 3  # of each kind of fault: one wrong setting misshapes every layer alike


@dataclass(frozen=True, slots=True)
class Part:
    """A weight in the files, or a part of one that is joined of several.

    The shape is that in the file of plain floats, and [out, in] or [entries, out, in] otherwise.
    """

    type: StoredType
    shape: Shape
    tensors: tuple[StoredTensor, ...]


def type_of(weight: str, files: Mapping[str, StoredTensor], quantized: StoredType | None) -> StoredType:
    """Return the type in which the files hold the weight; `quantized` is that of those that are quantized."""
    return quantized if quantized is not None and quantized.holds(weight, files) else PLAIN


def shape_of(source: Source, shape: Shape, stored: StoredType) -> Shape:
    """Return the shape of a source's part, given that in a file of plain floats."""
    return shape if stored is PLAIN or not source.transpose else (*shape[:-2], shape[-1], shape[-2])


def find_parts(
    folder: Path,
    family: Family,
    sources: Mapping[str, Source],
    files: Mapping[str, StoredTensor],
    quantized: StoredType | None,
) -> dict[str, Part]:
    """Return the parts of all sources by their names.

    Raises InvalidCheckpointError unless the files hold exactly these, in readable shapes and dtypes.
    """
    parts: dict[str, Part] = {}
    expected: set[str] = set()
    missing, misshapen, mistyped = list[str](), list[str](), list[str]()
    for source in sources.values():
        for weight, file_shape in source.parts:
            if weight in parts:
                continue
            stored = type_of(weight, files, quantized)
            shape = shape_of(source, file_shape, stored)
            try:
                tensors = stored.tensors(weight, shape, files)
            except UnfitError as fault:
                tensors = {}
                expected.update(name for name in files if name.startswith(weight.removesuffix("weight")))
                misshapen.append(f"{weight} is in {stored.name}, which {fault}, expected {list(file_shape)}")
            expected.update(tensors)
            for name, its in tensors.items():
                if name not in files:
                    missing.append(name)
                    continue
                found, shown_name = files[name], name if stored is PLAIN else files[name].name
                if found.shape != its.shape:
                    misshapen.append(f"{shown_name} is {shown(list(found.shape))}, expected {list(its.shape)}")
                if found.dtype not in its.dtypes:
                    mistyped.append(f"{shown_name} is {found.dtype}, expected one of {', '.join(its.dtypes)}")
            parts[weight] = Part(stored, shape, tuple(files[name] for name in tensors if name in files))
    is_ignored = re.compile(family.ignored).fullmatch
    unexpected = [shown(found.name) for name, found in files.items() if not (name in expected or is_ignored(name))]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen, "mistyped": mistyped}
    faults = [
        f"{len(names)} {kind} ({'; '.join(names[:NAMES_SHOWN])}{'; ...' if len(names) > NAMES_SHOWN else ''})"
        for kind, names in kinds.items()
        if names
    ]
    if faults:
        raise InvalidCheckpointError(f"the tensors in {folder} do not fit its config.json: {', '.join(faults)}")
    return parts
