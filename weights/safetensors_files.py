"""The tensors of a folder: the headers of its safetensors files, checked before anything is built of them.

Knows no family and no stored type, and reads no values. Every fault of a file raises a WeightsError of one sentence.
Called by checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Literal

from safetensors import SafetensorError, safe_open

from gptserve.weights.errors import InvalidCheckpointError, foreign_code, shown
from gptserve.weights.gguf.folder import tensors_of
from gptserve.weights.json_file import read_json_object
from gptserve.weights.source import require_safetensors
from gptserve.weights.stored_tensor import StoredTensor

NAMES_SHOWN = 3  # of several files

MAX_HEADER_BYTES = 2**25  # 128 bytes for each tensor; of the index of shards, too
MAX_TENSORS = 2**18
"""Mixtures of experts have the most: if each of the 18,432 matrices of Qwen3 30B-A3B's experts is quantized and stored
as four tensors, these are 73,728; DeepSeek-V3's are 178,176."""
COMMON_REASON = "Error while deserializing header: "
MAX_HEADER_COMMAS = 2**22  # 16 for each tensor


def find_tensors(folder: Path, prefixes: Sequence[str]) -> dict[str, StoredTensor]:
    """Return the tensors of all files, named without the family's prefixes."""
    found: dict[str, StoredTensor] = {}
    of_gguf = tensors_of(folder)
    for tensors in map(_read_header, _find_files(folder)) if of_gguf is None else [of_gguf]:
        for stored in tensors:
            prefix = next((prefix for prefix in prefixes if stored.name.startswith(prefix)), "")
            name = stored.name.removeprefix(prefix)
            if name in found:
                others = found[name].path.name
                raise InvalidCheckpointError(
                    f"{stored.path}: tensor {shown(stored.name)} must be stored once, but is in {others} too"
                )
            found[name] = stored
        if len(found) > MAX_TENSORS:
            raise InvalidCheckpointError(f"{folder} must hold at most {MAX_TENSORS} tensors, got {len(found)} or more")
    return found


def _find_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        return _find_shards(index_path)
    require_safetensors((path.name for path in folder.iterdir() if path.is_file()), str(folder))
    paths = sorted(folder.glob("*.safetensors"))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:NAMES_SHOWN])
        raise InvalidCheckpointError(
            f"{folder} must hold model.safetensors, its index or one *.safetensors file, got {len(paths)} ({names})"
        )
    return paths


def _find_shards(index_path: Path) -> list[Path]:
    index = read_json_object(index_path, InvalidCheckpointError, max_bytes=MAX_HEADER_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpointError(f"{index_path}: weight_map must be an object of tensors, got {shown(weight_map)}")
    paths = []
    for name in dict.fromkeys(map(str, weight_map.values())):
        if PurePath(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise InvalidCheckpointError(
                f"{index_path}: a shard must be a *.safetensors file of the same folder, got {shown(name)}"
            )
        path = index_path.parent / name
        if not path.is_file():
            raise InvalidCheckpointError(f"shard {shown(name)} is named in {index_path} but missing")
        paths.append(path)
    return paths


def _read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file, with offsets, sizes and types checked."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, MAX_HEADER_BYTES + 1))
    except OSError as fault:
        raise InvalidCheckpointError(f"{path} could not be read: {fault.strerror}") from fault
    # Before anything is built of it. What is longer than its file is no header.
    if len(text) > MAX_HEADER_BYTES and length < path.stat().st_size:
        raise InvalidCheckpointError(f"{path}: its header must have at most {MAX_HEADER_BYTES} bytes, got {length}")
    if text.count(b"{") > MAX_TENSORS + 2:
        raise InvalidCheckpointError(f"{path}: its header must list at most {MAX_TENSORS} tensors, got more")
    if text.count(b",") > MAX_HEADER_COMMAS:
        raise InvalidCheckpointError(f"{path}: its header must have at most {MAX_HEADER_COMMAS} commas, got more")
    with opened(path, "numpy"):  # imports neither numpy, as no value is read, nor torch, as it does with "pt"
        pass
    try:
        header = json.loads(text, object_pairs_hook=_unique_names)
    except ValueError as fault:
        raise InvalidCheckpointError(f"{path} is not a safetensors file: {fault}") from fault
    return [
        StoredTensor(
            path, name, entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"])
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return values


@contextmanager
def opened(path: Path, framework: Literal["pt", "numpy"] = "pt") -> Iterator[safe_open]:
    """Map a safetensors file; opening checks its header against its size. Values come as tensors of `framework`."""
    reason = f"{path} is not a readable safetensors file"
    try:
        with foreign_code(InvalidCheckpointError, reason):
            try:
                mapped = safe_open(path, framework=framework)
            except SafetensorError as fault:  # what is at fault comes last in its long sentence
                raise SafetensorError(str(fault).removeprefix(COMMON_REASON)) from fault
        with mapped as file:
            yield file
    except SafetensorError as fault:
        raise InvalidCheckpointError(f"{reason}: {fault}") from fault
