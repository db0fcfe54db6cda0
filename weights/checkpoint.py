"""The tensors of a model folder: checked against the family, then streamed one at a time from safetensors by mmap.

Does not know what the tensors mean, and never unpickles. Every fault of a file raises a WeightsError of one sentence.
Called by the engine's model runner.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from gptserve.weights.config import ModelConfig
from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.families import find_family, read_raw_config
from gptserve.weights.families.family import Shape, Source
from gptserve.weights.gguf.block_sizes import BLOCKS
from gptserve.weights.gguf.folder import SUFFIX as GGUF_SUFFIX
from gptserve.weights.gguf.tensors import read_tensor
from gptserve.weights.huge_pages import HugePages, mapped
from gptserve.weights.loading_threads import PIECE_ELEMENTS, map_pieces
from gptserve.weights.parts import (
    Part,
    apart_as_stored,
    find_code_formats,
    find_parts,
    rows_of_parts,
    turned_as_stored,
)
from gptserve.weights.pinned_ring import copier
from gptserve.weights.quantized import held_shapes, stored_types
from gptserve.weights.quantized.blocked import BlockedWeight, BlockRows
from gptserve.weights.quantized.coded import (
    AnyFormat,
    CodedWeight,
    CodeFormat,
    JoinedFormat,
    JoinedWeight,
    empty_codes,
    gives_codes,
)
from gptserve.weights.quantized.codes import require_finite
from gptserve.weights.quantized.gguf import CODE_FORMATS, Gguf
from gptserve.weights.quantized.stored_type import PLAIN, UNPACKED_ROWS, PackedType, StoredType
from gptserve.weights.safetensors_files import find_tensors, opened
from gptserve.weights.sharding import WHOLE, Share
from gptserve.weights.tied_head import resolve_head
from gptserve.weights.unread import UnreadWeight, named_faults, unread_weight

MAPPED_BYTES = 2**20
"""Tensors of so many bytes have mappings of their own."""

SAMPLES = 8  # evenly spread over a tensor, its two ends included
SAMPLE_BYTES = 512


class Checkpoint:
    """The weights of a model folder. Opening it checks every name, shape and dtype and reads no tensor.

    It streams the tensors of `share`. num_bytes is the size of the stored tensors that these are made of. `config` is
    the whole model's; it differs from the one given where the files have a head of their own, or lack
    one and it is not needed (tied_head.py). Raises a
    WeightsError naming the file, the rule and what was found.
    """

    def __init__(self, folder: Path, config: ModelConfig, share: Share = WHOLE, *, needs_head: bool = True) -> None:
        family, types = find_family(config.model_type), stored_types(read_raw_config(folder), folder)
        files = find_tensors(folder, family.prefixes)
        self.config, sources = resolve_head(family, config, files, types, needs_head=needs_head)
        sources = apart_as_stored(turned_as_stored(sources, files), files)
        self._parts = find_parts(folder, family, sources, files, types)
        self._sources = share.of_sources(config, sources)
        self.num_bytes = sum(map(self._num_bytes, self._sources.values()))

    @property
    def stored_types(self) -> frozenset[StoredType]:
        """The types in which the files hold some weight."""
        return frozenset(part.type for part in self._parts.values())

    def stream(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Callable[[int, int], None] | None = None,
        keeps: Collection[StoredType] = (),
        coded: Collection[str] = (),
        unread: Collection[str] = (),
    ) -> Iterator[tuple[str, Tensor | CodedWeight | BlockedWeight | JoinedWeight | UnreadWeight]]:
        """Yield (canonical name, contiguous tensor) in canonical order; on a CPU vectors share memory.

        The weights whose names are among `coded`, which are some of `code_formats`, come as their codes; those of a
        GGUF file as its blocks where that has all their numbers as they are, which are not yet read. Those whose names
        are among `unread` are not read either, on a CPU, unless they must be made in memory (unread.py).
        A weight of an expert whose stored type is among `keeps` comes as that holds it: in MXFP4 as its blocks and,
        after these, as {expert}.ffn_up.scales or {expert}.ffn_down.scales, its scales. Calls `progress` after each
        weight with the bytes read so far and in all. Memory holds the tensors that the caller keeps, the one being
        made, and the part of a file it is made from.
        """
        num_bytes_read = 0
        copies, pages = copier(torch.device(device)), HugePages()
        for name, source in self._sources.items():
            if name in coded:
                num_bytes_read += self._num_bytes(source)
                yield name, self._coded(source, self.code_formats[name], dtype)
                if progress is not None:
                    progress(num_bytes_read, self.num_bytes)
                continue
            if name in unread and (weight := unread_weight(source, self._parts, self._read, dtype)) is not None:
                num_bytes_read += self._num_bytes(source)
                yield name, weight
                if progress is not None:
                    progress(num_bytes_read, self.num_bytes)
                continue
            on, shapes = torch.device(device), self._shapes(name, source, keeps)
            its_dtype = torch.float32 if source.is_wide else dtype if len(shapes) == 1 else torch.uint8
            make = torch.zeros if source.is_zero else partial(_empty, pages)
            tensors = {part: make(shape, dtype=its_dtype, device=on) for part, shape in shapes.items()}
            if not source.is_zero:
                self._fill(tuple(tensors.values()), source, copies.copy)
                copies.join()
                _multiply(next(iter(tensors.values())), source)
            num_bytes_read += self._num_bytes(source)
            if progress is not None:
                progress(num_bytes_read, self.num_bytes)
            yield from tensors.items()

    @cached_property
    def code_formats(self) -> dict[str, AnyFormat]:
        """The weights that can come as codes, all their numbers as they are, by their canonical names."""
        return find_code_formats(self._sources, self._parts)

    def _coded(
        self, source: Source, its_format: AnyFormat, dtype: torch.dtype
    ) -> CodedWeight | BlockedWeight | JoinedWeight:
        """Return a weight as its codes, or as its blocks."""
        found = list[CodedWeight | BlockedWeight]()
        for its, group in _groups(source, its_format):
            found.append(self._blocked(group, its, dtype) or self._of_codes(group, its, dtype))
        return found[0] if len(found) == 1 else JoinedWeight(tuple(found))

    def _of_codes(self, source: Source, its_format: CodeFormat, dtype: torch.dtype) -> CodedWeight:
        """Return a weight as its codes in one format."""
        weight, row = empty_codes(its_format, source.joined_shape, dtype), 0
        for name, _ in source.parts:
            part, tensors = self._parts[name], self._read(name, source.entry)
            with named_faults(name, part):
                row = _set_codes(weight, row, part, part.shape if source.entry is None else part.shape[1:], tensors)
        return weight if source.row_order is None else weight.in_order(torch.tensor(source.row_order))

    def _blocked(self, source: Source, its_format: CodeFormat, dtype: torch.dtype) -> BlockedWeight | None:
        """Return the blocks of a weight; None if its parts are of several types, or are no blocks of this format."""
        types = [self._parts[name].type for name, _ in source.parts]
        names = {its.type_name if isinstance(its, Gguf) else "" for its in types}
        type_name = names.pop()
        if names or CODE_FORMATS.get(type_name) != its_format:
            return None
        pieces = tuple(self._block_rows(name, source.entry) for name, _ in source.parts)
        order = None if source.row_order is None else torch.tensor(source.row_order)
        return BlockedWeight(type_name, dtype, pieces, order)

    def _block_rows(self, name: str, entry: int | None) -> BlockRows:
        """Return the rows of a part in a type of GGUF."""
        part, (data,) = self._parts[name], self._read(name, entry).values()
        assert isinstance(part.type, Gguf)
        return BlockRows(name, data, part.type.places(len(data), slice(0, len(data))))

    def _shapes(self, name: str, source: Source, keeps: Collection[StoredType]) -> dict[str, Shape]:
        """Return the names and shapes of the tensors that a source becomes: of several, if it stays packed."""
        stored, *others = {self._parts[part].type for part, _ in source.parts}
        held = held_shapes(name, source.shape, stored) if stored in keeps and not others else None
        return {name: source.shape} if held is None else held

    def _fill(self, tensors: Sequence[Tensor], source: Source, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Copy the rows and columns of a source: to one tensor, or to several if it stays packed.

        What is not copied is not read of plain floats: parts lie in mapped files.
        """
        order, row = None if source.row_order is None else torch.tensor(source.row_order), 0
        for part, _ in source.parts:
            values = self._values(part, source, tensors[0].dtype, is_packed=len(tensors) > 1)
            for tensor, its_values in zip(tensors, values, strict=True):
                _copy_rows(its_values, row, tensor, order, copy)
            row += len(values[0])
            del values, its_values

    def _values(self, name: str, source: Source, dtype: torch.dtype, is_packed: bool) -> tuple[Tensor, ...]:
        """Return the columns of all rows of a part; as a PackedType holds them, if it stays packed."""
        part, tensors = self._parts[name], self._read(name, source.entry)
        start, end = source.columns or (0, source.shape[-1])
        if is_packed:
            assert isinstance(part.type, PackedType)
            return part.type.cut(tensors, start, end)
        if part.type is PLAIN:
            (values,) = tensors.values()
            values = values.t() if source.transpose else values.view(-1) if values.dim() == 0 else values
        else:
            with named_faults(name, part):
                values = _unpack(part.type, part.shape if source.entry is None else part.shape[1:], tensors, dtype)
        values = values.flatten() if source.is_flat else values
        return (values if source.columns is None else values[:, start:end],)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the weights: 64 hexadecimal digits, which do not depend on how the files are sharded.

        It covers every tensor's name, dtype and shape and a fixed sample of its bytes. It misses a change outside the
        samples, but training changes nearly every byte.
        """
        digest = hashlib.sha256()
        parts = {
            part: self._parts[part].tensors.values() for source in self._sources.values() for part, _ in source.parts
        }
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

    def _read(self, part: str, entry: int | None) -> dict[str, Tensor]:
        """Return the stored tensors of a part, or one entry of each, by the endings of their names."""
        tensors: dict[str, Tensor] = {}
        for ending, stored in self._parts[part].tensors.items():
            if stored.dtype in BLOCKS and stored.path.suffix.lower() == GGUF_SUFFIX:
                tensors[ending] = read_tensor(stored if entry is None else stored.entry(entry))
                continue
            # Opened for this tensor alone and unmapped with its values: pages never add up to whole files.
            with opened(stored.path) as file:
                if entry is None:
                    tensors[ending] = file.get_tensor(stored.name)  # type: ignore[no-untyped-call]
                else:
                    tensors[ending] = file.get_slice(stored.name)[entry]  # type: ignore[no-untyped-call]
        return tensors

    def _num_bytes(self, source: Source) -> int:
        """Return how many stored bytes make this tensor."""
        sizes = [stored.end - stored.start for part, _ in source.parts for stored in self._parts[part].tensors.values()]
        return sum(sizes) if source.entry is None else sum(sizes) // source.parts[0][1][0]


def _groups(source: Source, its_format: AnyFormat) -> Iterator[tuple[CodeFormat, Source]]:
    """Yield the sources of the parts of a weight that have one format."""
    if not isinstance(its_format, JoinedFormat):
        yield its_format, source
        return
    rows = rows_of_parts(source)
    assert rows is not None
    parts = iter(zip(source.parts, rows, strict=True))
    for num_rows, its in its_format.parts:
        its_parts, order, first = list[tuple[str, Shape]](), list[int](), 0
        while len(order) < num_rows:
            part, numbers = next(parts)
            its_parts.append(part)
            order += [first + number for number in numbers]
            first += replace(source, parts=(part,)).joined_shape[0]
        its_order = None if source.row_order is None else tuple(order)
        yield its, replace(source, parts=tuple(its_parts), row_order=its_order)


def _unpack(stored: StoredType, shape: Shape, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, ...] of a quantized part, made in pieces of rows; or a vector."""
    if len(shape) == 1:
        return stored.unpack(shape, tensors, slice(0, *shape), dtype)
    values = torch.empty(shape, dtype=dtype)

    def fill(rows: slice) -> None:
        unpacked = stored.unpack(shape, tensors, rows, dtype)
        require_finite(unpacked)
        values[rows] = unpacked

    _map_rows(fill, shape[0], math.prod(shape[1:]))
    return values


def _set_codes(weight: CodedWeight, start: int, part: Part, shape: Shape, tensors: Mapping[str, Tensor]) -> int:
    """Set rows of a weight from `start` on to those of a part [out, in]; return where they end."""
    stored, (num_out, num_in) = part.type, shape
    assert gives_codes(stored)

    def fill(rows: slice) -> None:
        its_rows = slice(start + rows.start, start + rows.stop)
        coded = stored.coded(shape, tensors, rows, weight.dtype)
        for numbers in (coded.scales, coded.others):
            if numbers is not None:
                require_finite(numbers)
        weight.set_rows(its_rows, coded)

    _map_rows(fill, num_out, num_in)
    return start + num_out


def _map_rows(fill: Callable[[slice], object], num_out: int, num_in: int) -> None:
    """Call `fill` for pieces of all rows of a weight [out, in]."""
    num_rows = max(1, PIECE_ELEMENTS // max(1, num_in) // UNPACKED_ROWS) * UNPACKED_ROWS
    spans = [slice(start, min(start + num_rows, num_out)) for start in range(0, num_out, num_rows)]
    for _ in map_pieces(fill, spans):
        pass


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


def _multiply(tensor: Tensor, source: Source) -> None:
    """Multiply rows by the factors of a source."""
    start = 0
    for num, factor in source.factors:
        tensor[start : start + num].mul_(factor)
        start += num


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
