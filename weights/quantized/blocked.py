"""Weights as the blocks of a GGUF file, where they are mapped: the engine packs them as they lie.

Codes of a byte each, as coded.py has them, would be written and read again in between. checkpoint.py makes these
weights; like coded.py, importing this does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.gguf.block_sizes import BLOCKS
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from gptserve.weights.quantized.codes import require_finite
from gptserve.weights.quantized.gguf import CODE_FORMATS, coded_blocks
from gptserve.weights.quantized.stored_type import UnfitError
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The rows of a part: `data`, uint8 [stored rows, bytes of a row], and where they are in it, int64 [rows]."""

    name: str
    data: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A weight [out, in] of one of GGUF's types whose numbers are codes in groups: the rows of `pieces`, joined.

    Row i is row order[i] of these, int64 [out]; None: they are in their own order. `dtype` is that of computation.
    """

    type_name: str
    dtype: torch.dtype
    pieces: tuple[BlockRows, ...]
    order: Tensor | None = None

    @property
    def format(self) -> CodeFormat:
        """Of the codes."""
        return CODE_FORMATS[self.type_name]

    @property
    def shape(self) -> Shape:
        """[out, in]."""
        block = BLOCKS[self.type_name]
        num_in = self.pieces[0].data.shape[1] // block.num_bytes * block.num_elements
        return sum(len(its.places) for its in self.pieces) if self.order is None else len(self.order), num_in

    @property
    def parts(self) -> tuple[BlockedWeight, ...]:
        """Itself, as a JoinedWeight has several."""
        return (self,)

    def addresses(self) -> Tensor:
        """Return where the blocks of each row begin, int64 [out]; valid while this weight lives."""
        import torch

        found = torch.cat([its.data.data_ptr() + its.places * its.data.stride(0) for its in self.pieces])
        return found if self.order is None else found[self.order]

    def coded(self, rows: slice) -> CodedWeight:
        """Return some rows as codes. Raises InvalidCheckpointError if a number of theirs is not finite."""
        import torch

        numbers = torch.arange(self.shape[0])[rows]
        numbers = numbers if self.order is None else self.order[numbers]
        blocks, start = torch.empty(len(numbers), self.pieces[0].data.shape[1], dtype=torch.uint8), 0
        for piece in self.pieces:
            mine = (numbers >= start) & (numbers < start + len(piece.places))
            blocks[mine] = piece.data[piece.places[numbers[mine] - start]]
            start += len(piece.places)
        return self._codes_of(blocks, " and ".join(piece.name for piece in self.pieces))

    def values(self, rows: slice) -> Tensor:
        """Return some rows of the weight in fp32. Raises InvalidCheckpointError as `coded` does."""
        return self.coded(rows).values(slice(None))

    def require_finite(self) -> None:
        """Raise InvalidCheckpointError, which names the part, if a number in fp16 is not finite."""
        for piece in self.pieces:
            self._codes_of(piece.data, piece.name)

    def _codes_of(self, blocks: Tensor, name: str) -> CodedWeight:
        codes = coded_blocks(self.type_name, blocks, self.dtype)
        try:
            for numbers in (codes.scales, codes.others):
                if numbers is not None:
                    require_finite(numbers)
        except UnfitError as fault:
            raise InvalidCheckpointError(f"{name} is in GGUF's {self.type_name}, which {fault}") from fault
        return codes
