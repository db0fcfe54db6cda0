"""What several stored types have in common: codes in words of 32 bits, and numbers that a group or a block shares.

Tensors are used by their methods alone, so that importing this does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gptserve.weights.errors import UnsupportedModelError, shown
from gptserve.weights.quantized.stored_type import Found, UnfitError
from gptserve.weights.raw_config import RawConfig
from gptserve.weights.stored_tensor import Shape

if TYPE_CHECKING:
    from torch import Tensor

Bits = Literal[4, 8]
BITS: tuple[Bits, ...] = (4, 8)
"""Of the codes that are read: a word of 32 bits has a whole number of them."""

Block = tuple[int, int]
"""How many outputs and inputs share a scale."""


def read_bits(section: RawConfig, name: str, default: int | None = None, choices: tuple[Bits, ...] = BITS) -> Bits:
    """Return the bits of a code. Raises InvalidConfigError, or UnsupportedModelError where they are not read."""
    bits, rule = section.value(name, default), " or ".join(map(str, choices))
    if type(bits) is not int:
        raise section.error(name, rule)
    for choice in choices:
        if bits == choice:
            return choice
    raise UnsupportedModelError(f"{section.file_name}: {name} must be {rule}, got {shown(bits)}: others are not read")


def read_group_size(section: RawConfig, name: str) -> int | None:
    """Return how many inputs have a scale; None: all of an output, which is -1 or absent in the file."""
    return None if section.value(name, -1) == -1 else section.size(name)


def read_choice(section: RawConfig, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
    """Return a text in lower case. Raises UnsupportedModelError for one that is not among the choices."""
    value = section.value(name, default)
    lower = value.lower() if isinstance(value, str) else None
    if lower not in choices:
        rule = ", ".join(choices)
        raise UnsupportedModelError(
            f"{section.file_name}: {name} must be {rule}, got {shown(value)}: others are not read"
        )
    return lower


def read_block(section: RawConfig, name: str) -> Block | None:
    """Return the sizes of a block, or None where there is none."""
    value = section.value(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise section.error(name, "two sizes above 0")
    return value[0], value[1]


def require_matrix(shape: Shape, multiple_of: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Return out and in of a weight. Raises UnfitError if it is none, or not of such multiples."""
    if len(shape) != 2:
        raise UnfitError("takes a matrix")
    for size, unit, what in zip(shape, multiple_of, ("outputs", "inputs"), strict=True):
        if size % unit:
            raise UnfitError(f"takes a multiple of {unit} {what}")
    return shape[0], shape[1]


def num_groups(num_in: int, group_size: int | None) -> int:
    """Return how many groups the inputs make; the last one may be smaller."""
    return 1 if group_size is None else -(-num_in // group_size)


def block_shape(shape: Shape, block: Block) -> Shape:
    """Return the shape of the scales of a weight [out, in]; the last blocks may be smaller."""
    return tuple(-(-size // its) for size, its in zip(shape, block, strict=True))


def scalar_shape(found: Found, ending: str) -> Shape:
    """Return the shape of one number, which libraries store as [] or [1]."""
    return () if ending in found and found[ending].shape == () else (1,)


def codes_of(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes, int32 [rows, words * 32 / bits], of words int32 [rows, words], the lowest bits first.

    `places`, if given, has the place in its word of each code, counted from the lowest bits.
    """
    shifts = words.new_tensor([bits * place for place in places or range(32 // bits)])
    return ((words.contiguous()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def require_finite(numbers: Tensor) -> None:
    """Raise UnfitError for numbers of which one is not finite: a scale spoils many weights."""
    import torch

    if not numbers.sum(dtype=torch.float32).isfinite() and not numbers.isfinite().all():  # their sum may overflow
        raise UnfitError("takes finite numbers, got others")


def of_inputs(values: Tensor, num_in: int, group_size: int | None, groups: Tensor | None = None) -> Tensor:
    """Return [rows, in], or [rows, 1] of all inputs, of values [rows, groups]: each for the inputs of its group.

    `groups`, if given, has the group of each input, int32 [in]. Raises UnfitError for one that there is not.
    """
    values, num = values.contiguous(), values.shape[-1]  # or the result is not, and all that follows is slow
    if groups is not None and num_in:
        first, last = int(groups.min()), int(groups.max())
        if not 0 <= first <= last < num:
            raise UnfitError(f"takes groups of inputs in [0, {num}), got {first} to {last}")
        return values[..., groups.long()]
    return values if num == 1 else values.repeat_interleave(group_size or num_in, -1)[..., :num_in]


def of_blocks(values: Tensor, rows: slice, num_in: int, block: Block) -> Tensor:
    """Return [rows, in] of values [out / block, in / block], for these rows of all outputs."""
    of_rows = values[[row // block[0] for row in range(rows.start, rows.stop)]]
    return of_inputs(of_rows, num_in, block[1])
