"""Weights of integers with a scale, and a zero or a least value, for many inputs, as codes of groups (coded.py).

awq.py, gptq.py, compressed_tensors.py and mlx.py store such weights, each in its own layout. Their groups are
multiples of coded.GROUP, or whole outputs, and repeat their numbers. Importing this does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptserve.weights.quantized.coded import GROUP, CodedWeight, CodeFormat, Kind
from gptserve.weights.quantized.codes import Bits
from gptserve.weights.stored_tensor import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def has_whole_groups(num_in: int, group_size: int | None, inputs: StoredTensor | None = None) -> bool:
    """Return whether each GROUP inputs that follow each other share their numbers; None: all of an output do.

    `inputs`, int32 [in], if given, has the group of each: act-order may have put those of a group anywhere. Raises
    InvalidCheckpointError if it cannot be read.
    """
    if num_in % GROUP or (group_size or GROUP) % GROUP:
        return False
    return inputs is None or inputs.counts_up(min(group_size or num_in, num_in))


def format_of(bits: Bits, scales: StoredTensor, zeros: StoredTensor | None = None, zero: int = 0) -> CodeFormat | None:
    """Return the format of codes of 4 or 8 bits; None if fp16 does not have all scales.

    `zeros`, if given, are stored codes, of which `zero` stands for half of the number of codes. Raises
    InvalidCheckpointError if they cannot be read.
    """
    if not scales.has_halves():
        return None
    byte = zero * 0x11 if bits == 4 else zero
    kind: Kind = "scales" if zeros is None or zeros.holds_only(byte) else "scales and zeros"
    return CodeFormat(bits, kind)


def coded_weight(
    its: CodeFormat,
    dtype: torch.dtype,
    codes: Tensor,
    scales: Tensor,
    others: Tensor | None,
    group_size: int | None,
) -> CodedWeight:
    """Return the weight of codes [out, in], with scales and others [out, groups], or of any shape if they are one."""
    import torch

    num_out, num_in = codes.shape
    num = num_in // GROUP

    def of_groups(values: Tensor) -> Tensor:
        values = values.half()
        if values.numel() == 1 or values.shape[-1] == 1:
            return values.reshape(-1, 1).expand(num_out, num)
        return values.repeat_interleave((group_size or num_in) // GROUP, -1)[:, :num]

    return CodedWeight(
        its, dtype, codes.to(torch.uint8), of_groups(scales), None if others is None else of_groups(others)
    )
