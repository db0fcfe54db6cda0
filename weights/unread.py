"""Weights that stay in their files until they are packed, some rows at a time: no copy of them lies in memory.

checkpoint.py makes them of the weights that become codes; engine/backends/cpu/int4.py packs them. A tied embedding is
read row by row until its head is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.families.family import Source
from gptserve.weights.parts import Part
from gptserve.weights.quantized.codes import require_finite
from gptserve.weights.quantized.stored_type import PLAIN, UNPACKED_ROWS, UnfitError
from gptserve.weights.stored_tensor import Shape


class UnreadRows(Protocol):
    """The rows of a part of a weight, in any dtype."""

    def __len__(self) -> int: ...

    def rows(self, rows: slice) -> Tensor:
        """Return these rows [rows, in]. Raises InvalidCheckpointError for numbers that have no meaning."""

    def chosen(self, numbers_R: Tensor) -> Tensor:
        """Return the rows [R, in] of these numbers, int64."""


class PlainRows:
    """UnreadRows of plain floats: `values` [rows, in], where a file is mapped."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def rows(self, rows: slice) -> Tensor:
        return self._values[rows]

    def chosen(self, numbers_R: Tensor) -> Tensor:
        return self._values[numbers_R]


class StoredRows:
    """UnreadRows of another stored type: the tensors of a part [out, in], or of one entry of it."""

    def __init__(self, name: str, part: Part, shape: Shape, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._name, self._part, self._shape, self._tensors, self._dtype = name, part, shape, tensors, dtype

    def __len__(self) -> int:
        return self._shape[0]

    def rows(self, rows: slice) -> Tensor:
        start = rows.start // UNPACKED_ROWS * UNPACKED_ROWS
        stop = min(-(-rows.stop // UNPACKED_ROWS) * UNPACKED_ROWS, len(self))
        with named_faults(self._name, self._part):
            unpacked = self._part.type.unpack(self._shape, self._tensors, slice(start, stop), self._dtype)
            require_finite(unpacked)
        return unpacked[rows.start - start : rows.stop - start]

    def chosen(self, numbers_R: Tensor) -> Tensor:
        rows = [self.rows(slice(number, number + 1)) for number in numbers_R.tolist()]
        return torch.cat(rows) if rows else torch.empty(0, self._shape[1], dtype=self._dtype)


class UnreadWeight:
    """A weight [out, in] of the rows of `parts`, joined; threads may read it at once.

    Row i is row order[i] of these, int64 [out]; None: they are in their own order. `dtype` is that of computation. It
    is also a Rows. What reads raises InvalidCheckpointError for numbers that have no meaning.
    """

    device = torch.device("cpu")

    def __init__(self, parts: Sequence[UnreadRows], shape: Shape, dtype: torch.dtype, order: Tensor | None) -> None:
        self._parts, self.dtype, self._order = parts, dtype, order
        self.shape = shape[0], shape[1]
        assert shape[0] == (sum(map(len, parts)) if order is None else len(order))

    def rows(self, rows: slice) -> Tensor:
        """Return these rows [rows, in], contiguous, in the dtype; where a file is mapped, if they lie in it so."""
        if self._order is not None:
            return self[torch.arange(rows.start, rows.stop)]
        pieces, first = list[Tensor](), 0
        for part in self._parts:
            start, stop = max(0, rows.start - first), min(len(part), rows.stop - first)
            if start < stop:
                pieces.append(part.rows(slice(start, stop)))
            first += len(part)
        if len(pieces) == 1:
            return pieces[0].to(self.dtype).contiguous()
        joined, first = torch.empty(rows.stop - rows.start, self.shape[1], dtype=self.dtype), 0
        for piece in pieces:
            joined[first : first + len(piece)] = piece
            first += len(piece)
        return joined

    def __getitem__(self, numbers_R: Tensor) -> Tensor:
        """Return the rows [R, in] of these numbers, int64, in [0, out)."""
        numbers = numbers_R if self._order is None else self._order[numbers_R]
        found, first = torch.empty(len(numbers), self.shape[1], dtype=self.dtype), 0
        for part in self._parts:
            mine = (numbers >= first) & (numbers < first + len(part))
            found[mine] = part.chosen(numbers[mine] - first).to(self.dtype)
            first += len(part)
        return found

    def whole(self) -> Tensor:
        """Return all rows [out, in] in memory."""
        return self.rows(slice(0, self.shape[0]))


def unread_weight(
    source: Source,
    parts: Mapping[str, Part],
    read: Callable[[str, int | None], dict[str, Tensor]],
    dtype: torch.dtype,
) -> UnreadWeight | None:
    """Return the weight of a source; None if it must be made in memory.

    `read` returns the stored tensors of a part, of one entry if this is given, by the endings of their names.
    """
    shape, is_plain = source.shape, all(parts[name].type is PLAIN for name, _ in source.parts)
    if not source.is_of_rows or len(shape) != 2:
        return None
    if not is_plain and source.row_order is not None:  # rows of other types are not read one by one
        return None
    order = None if source.row_order is None else torch.tensor(source.row_order)
    rows = [_rows_of(name, parts[name], source, read(name, source.entry), dtype) for name, _ in source.parts]
    return UnreadWeight(rows, shape, dtype, order)


def _rows_of(name: str, part: Part, source: Source, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> UnreadRows:
    if part.type is not PLAIN:
        return StoredRows(name, part, part.shape if source.entry is None else part.shape[1:], tensors, dtype)
    (values,) = tensors.values()
    return PlainRows(values.t() if source.transpose else values)


@contextmanager
def named_faults(name: str, part: Part) -> Iterator[None]:
    """Raise InvalidCheckpointError, which names the part, for an UnfitError."""
    try:
        yield
    except UnfitError as fault:
        raise InvalidCheckpointError(f"{name} is in {part.type.name}, which {fault}") from fault
