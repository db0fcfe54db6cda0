"""The tensors of a model folder: checked against the family, then streamed one at a time from safetensors by mmap.

Does not know what the tensors mean, and never unpickles. Every fault of a file raises a WeightsError of one sentence.
Called by the engine's model runner.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptserve.weights import mxfp4
from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidCheckpointError, foreign_code, shown
from gptserve.weights.families import find_family
from gptserve.weights.families.family import Family, Shape, Source
from gptserve.weights.huge_pages import HugePages, mapped
from gptserve.weights.json_file import read_json_object
from gptserve.weights.mxfp4_shapes import GROUP, SUFFIXES, held_shapes, packed_shapes
from gptserve.weights.pinned_ring import copier
from gptserve.weights.sharding import WHOLE, Share
from gptserve.weights.source import require_safetensors
from gptserve.weights.stored_tensor import StoredTensor
from gptserve.weights.tied_head import resolve_head

ACCEPTED_DTYPES = ("BF16", "F16", "F32")
PACKED_DTYPES = ("U8",)
NAMES_SHOWN = 3  # of each kind of fault: one wrong setting misshapes every layer alike

MAX_HEADER_BYTES = 2**25  # 128 bytes for each tensor; of the index of shards, too
MAX_TENSORS = 2**18
"""Mixtures of experts have the most: if each of the 18,432 matrices of Qwen3 30B-A3B's experts is quantized and stored
as four tensors, these are 73,728; DeepSeek-V3's are 178,176."""
MAX_HEADER_COMMAS = 2**22  # 16 for each tensor

MAPPED_BYTES = 2**20
"""Tensors of so many bytes have mappings of their own."""

SAMPLES = 8  # evenly spread over a tensor, its two ends included
SAMPLE_BYTES = 512


class Checkpoint:
    """The weights of a model folder. Opening it checks every name, shape and dtype and reads no tensor.

    It streams the tensors of `share`. num_bytes is the size of the stored tensors that these are made of. `config` is
    the whole model's; it differs from the one given where the files have a head of their own (tied_head.py). Raises a
    WeightsError naming the file, the rule and what was found.
    """

    def __init__(self, folder: Path, config: ModelConfig, share: Share = WHOLE) -> None:
        family = find_family(config.model_type)
        self._stored = _find_tensors(folder, family)
        self.config, sources = resolve_head(family, config, self._stored)
        _check_tensors(folder, family, sources, self._stored)
        self._sources = share.of_sources(config, sources)
        self.num_bytes = sum(map(self._num_bytes, self._sources.values()))

    def stream(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Callable[[int, int], None] | None = None,
        keeps_mxfp4: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, contiguous tensor) in canonical order; on a CPU vectors share memory.

        With keeps_mxfp4 a weight of an expert that is stored in MXFP4 comes as its blocks, and after it, as
        {expert}.ffn_up.scales or {expert}.ffn_down.scales, its scales, in `held_shapes`. Calls `progress` after each
        weight with the bytes read so far and in all. Memory holds the tensors that the caller keeps, the one being
        made, and the part of a file it is made from.
        """
        num_bytes_read = 0
        copies, pages = copier(torch.device(device)), HugePages()
        for name, source in self._sources.items():
            on, shapes = torch.device(device), self._shapes(name, source, keeps_mxfp4)
            its_dtype = dtype if len(shapes) == 1 else torch.uint8
            make = torch.zeros if source.is_zero else partial(_empty, pages)
            tensors = {part: make(shape, dtype=its_dtype, device=on) for part, shape in shapes.items()}
            if not source.is_zero:
                self._fill(tuple(tensors.values()), source, copies.copy)
                copies.join()
            num_bytes_read += self._num_bytes(source)
            if progress is not None:
                progress(num_bytes_read, self.num_bytes)
            yield from tensors.items()

    def _shapes(self, name: str, source: Source, keeps_mxfp4: bool) -> dict[str, Shape]:
        """Return the names and shapes of the tensors that a source becomes: of two, if it stays packed."""
        is_stored_packed = all(len(self._stored[part]) == len(SUFFIXES) for part, _ in source.parts)
        is_of_expert = source.entry is not None and source.transpose
        shapes = held_shapes(source.shape) if keeps_mxfp4 and is_stored_packed and is_of_expert else None
        names = name, f"{name.removesuffix('weight')}scales"
        return {name: source.shape} if shapes is None else dict(zip(names, shapes, strict=True))

    def _fill(self, tensors: Sequence[Tensor], source: Source, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Copy the rows and columns of a source: to one tensor, or to two if it stays packed.

        What is not copied is not read: parts lie in mapped files.
        """
        order, row = None if source.row_order is None else torch.tensor(source.row_order), 0
        for part, _ in source.parts:
            values = self._values(part, source, tensors[0].dtype, is_packed=len(tensors) > 1)
            for tensor, its_values in zip(tensors, values, strict=True):
                _copy_rows(its_values, row, tensor, order, copy)
            row += len(values[0])
            del values, its_values

    def _values(self, part: str, source: Source, dtype: torch.dtype, is_packed: bool) -> tuple[Tensor, ...]:
        """Return the columns of all rows of a part; blocks and scales if it stays packed."""
        values, *its_scales = self._read(part, source.entry)
        start, end = source.columns or (0, source.shape[-1])
        if is_packed:
            return mxfp4.cut(values, its_scales[0], start, end)
        values = mxfp4.unpack(values, its_scales[0], dtype) if its_scales else values
        values = values.t() if source.transpose else values
        return (values if source.columns is None else values[:, start:end],)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the weights: 64 hexadecimal digits, which do not depend on how the files are sharded.

        It covers every tensor's name, dtype and shape and a fixed sample of its bytes. It misses a change outside the
        samples, but training changes nearly every byte.
        """
        digest = hashlib.sha256()
        parts = {part: self._stored[part] for source in self._sources.values() for part, _ in source.parts}
        for name, stored in ((name, stored) for name, files in parts.items() for stored in files):
            digest.update(repr((name, stored.dtype, stored.shape)).encode())
            last = max(stored.start, stored.end - SAMPLE_BYTES)
            try:
                with stored.path.open("rb") as file:
                    for i in range(SAMPLES):
                        start = stored.start + (last - stored.start) * i // (SAMPLES - 1)
                        file.seek(start)
                        digest.update(file.read(min(SAMPLE_BYTES, stored.end - start)))
            except OSError as fault:
                raise InvalidCheckpointError(f"{stored.path} could not be read: {fault.strerror}") from fault
        return digest.hexdigest()

    def _read(self, part: str, entry: int | None) -> list[Tensor]:
        """Return the stored tensors of a part, or one entry of each."""
        tensors: list[Tensor] = []
        for stored in self._stored[part]:
            # Opened for this tensor alone and unmapped with its values: pages never add up to whole files.
            with _opened(stored.path) as file:
                if entry is None:
                    tensors.append(file.get_tensor(stored.name))  # type: ignore[no-untyped-call]
                else:
                    tensors.append(file.get_slice(stored.name)[entry])  # type: ignore[no-untyped-call]
        return tensors

    def _num_bytes(self, source: Source) -> int:
        """Return how many stored bytes make this tensor."""
        sizes = [stored.end - stored.start for part, _ in source.parts for stored in self._stored[part]]
        return sum(sizes) if source.entry is None else sum(sizes) // source.parts[0][1][0]


def _empty(pages: HugePages, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor; on a CPU vectors lie in these pages, as they stay after the matrices beside them are packed."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= MAPPED_BYTES:
        return mapped(num_bytes).view(dtype).view(shape)
    if len(shape) == 1:
        return pages.take(num_bytes).view(dtype)
    return torch.empty(shape, dtype=dtype)


def _copy_rows(
    values: Tensor, row: int, tensor: Tensor, order: Tensor | None, copy: Callable[[Tensor, Tensor], object]
) -> None:
    """Copy the joined rows from `row` on to their places, which are the same without an order."""
    end = row + len(values)
    if order is None:
        copy(tensor[row:end], values)
        return
    (places,) = torch.where((order >= row) & (order < end))
    for run in places.tensor_split(torch.where(places.diff() > 1)[0] + 1):
        if len(run):
            copy(tensor[run[0] : run[-1] + 1], values[order[run] - row])


def _find_tensors(folder: Path, family: Family) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the tensors of all files, named without the family's prefixes; a packed one is blocks and scales."""
    found: dict[str, StoredTensor] = {}
    for path in _find_files(folder):
        for stored in _read_header(path):
            prefix = next((prefix for prefix in family.prefixes if stored.name.startswith(prefix)), "")
            name = stored.name.removeprefix(prefix)
            if name in found:
                raise InvalidCheckpointError(
                    f"{path}: tensor {shown(stored.name)} must be stored once, but is in {found[name].path.name} too"
                )
            found[name] = stored
        if len(found) > MAX_TENSORS:
            raise InvalidCheckpointError(f"{folder} must hold at most {MAX_TENSORS} tensors, got {len(found)} or more")
    tensors: dict[str, tuple[StoredTensor, ...]] = {name: (stored,) for name, stored in found.items()}
    blocks, scales = SUFFIXES
    for name in [name.removesuffix(blocks) for name in found if name.endswith(blocks)]:
        if name not in found and name + scales in found:
            tensors[name] = (*tensors.pop(name + blocks), *tensors.pop(name + scales))
    return tensors


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
    with _opened(path):
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
def _opened(path: Path) -> Iterator[safe_open]:
    """Map a safetensors file; opening checks its header against its size."""
    reason = f"{path} is not a readable safetensors file"
    try:
        with foreign_code(InvalidCheckpointError, reason):
            opened = safe_open(path, framework="pt")
        with opened as file:
            yield file
    except SafetensorError as fault:
        raise InvalidCheckpointError(f"{reason}: {fault}") from fault


def _check_tensors(
    folder: Path, family: Family, sources: Mapping[str, Source], found: Mapping[str, tuple[StoredTensor, ...]]
) -> None:
    """Raise InvalidCheckpointError unless the files hold exactly the expected tensors, in readable dtypes."""
    expected = {name: shape for source in sources.values() for name, shape in source.parts}
    is_ignored = re.compile(family.ignored).fullmatch
    missing = [name for name in expected if name not in found]
    unexpected = [shown(files[0].name) for name, files in found.items() if not (name in expected or is_ignored(name))]
    misshapen, mistyped = [], []
    for name, shape in expected.items():
        files = found.get(name, ())
        is_packed = len(files) == len(SUFFIXES)
        if is_packed and (len(shape) < 2 or shape[-2] % GROUP):
            misshapen.append(f"{name} is in MXFP4, which takes a multiple of {GROUP} inputs, expected {list(shape)}")
            continue
        shapes = packed_shapes(shape) if is_packed else (shape,)
        dtypes = PACKED_DTYPES if is_packed else ACCEPTED_DTYPES
        for stored, its_shape in zip(files, shapes, strict=False):
            shown_name = stored.name if is_packed else name
            if stored.shape != its_shape:
                misshapen.append(f"{shown_name} is {shown(list(stored.shape))}, expected {list(its_shape)}")
            if stored.dtype not in dtypes:
                mistyped.append(f"{shown_name} is {stored.dtype}, expected one of {', '.join(dtypes)}")
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen, "mistyped": mistyped}
    faults = [
        f"{len(names)} {kind} ({'; '.join(names[:NAMES_SHOWN])}{'; ...' if len(names) > NAMES_SHOWN else ''})"
        for kind, names in kinds.items()
        if names
    ]
    if faults:
        raise InvalidCheckpointError(f"the tensors in {folder} do not fit its config.json: {', '.join(faults)}")
