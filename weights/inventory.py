"""What the files of a model hold: of each part of each canonical tensor, the stored type and its bytes.

Reads headers, no values, and does not import torch. `gptserve inspect` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gptserve.weights.config import ModelConfig
from gptserve.weights.families import find_family, read_raw_config
from gptserve.weights.families.family import Source
from gptserve.weights.gguf.folder import TENSORS_FILE
from gptserve.weights.parts import Part, apart_as_stored, find_code_formats, find_parts, turned_as_stored
from gptserve.weights.quantized import stored_types
from gptserve.weights.quantized.coded import AnyFormat
from gptserve.weights.quantized.stored_type import PLAIN
from gptserve.weights.safetensors_files import find_tensors
from gptserve.weights.tied_head import resolve_head


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight of the files that `canonical` is made of, alone or as part `number` of `num_parts` that are joined."""

    canonical: str
    number: int
    num_parts: int
    type: str
    """The stored type's name; of plain floats, their dtype."""
    num_bytes: int
    num_weights: int


def has_weights(folder: Path) -> bool:
    """Return whether a folder has any weights, and not just what describes them."""
    return (folder / TENSORS_FILE).is_file() or any(folder.glob("*.safetensors"))


def stored_parts(folder: Path, config: ModelConfig) -> Iterator[StoredPart]:
    """Yield the weights in the files, each once, in canonical order. Raises a WeightsError."""
    seen = set[str]()
    sources, parts = _found(folder, config)
    for canonical, source in sources.items():
        for number, (name, shape) in enumerate(source.parts):
            if name in seen:  # several experts may be one tensor
                continue
            seen.add(name)
            tensors = parts[name].tensors.values()
            dtypes = ", ".join(dict.fromkeys(tensor.dtype for tensor in tensors))
            its_type = dtypes if parts[name].type == PLAIN else parts[name].type.name
            num_bytes = sum(tensor.end - tensor.start for tensor in tensors)
            yield StoredPart(canonical, number, len(source.parts), its_type, num_bytes, math.prod(shape))


def code_formats(folder: Path, config: ModelConfig) -> dict[str, AnyFormat]:
    """Return the weights that can come as codes, by their canonical names: Checkpoint.code_formats."""
    return find_code_formats(*_found(folder, config))


def _found(folder: Path, config: ModelConfig) -> tuple[Mapping[str, Source], Mapping[str, Part]]:
    family, types = find_family(config.model_type), stored_types(read_raw_config(folder), folder)
    files = find_tensors(folder, family.prefixes)
    _, sources = resolve_head(family, config, files, types)
    sources = apart_as_stored(turned_as_stored(sources, files), files)
    return sources, find_parts(folder, family, sources, files, types)
