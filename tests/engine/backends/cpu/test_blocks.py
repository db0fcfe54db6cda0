"""Blocks of GGUF's types that are packed as they lie: bit for bit what is packed of their codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.linear import NativeCodedLinear
from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.gguf.block_sizes import BLOCKS
from gptserve.weights.quantized.blocked import BlockedWeight, BlockRows
from gptserve.weights.quantized.coded import JoinedWeight
from gptserve.weights.quantized.gguf import CODE_FORMATS

HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}
"""Where the blocks of a type have numbers in fp16."""
of_all = pytest.mark.parametrize("type_name", native.BLOCK_TYPES)


@pytest.fixture(autouse=True)
def _library() -> None:
    if not native.is_available():
        pytest.skip("needs the compiled library")


def rows(type_name: str, num_rows: int, name: str = "a") -> BlockRows:
    """Return rows of two to sixteen blocks of random bytes, in any order, whose numbers in fp16 are finite."""
    its = BLOCKS[type_name]
    data = torch.randint(0, 256, (num_rows, 512 // its.num_elements, its.num_bytes), dtype=torch.uint8)
    for start in HALVES[type_name]:
        numbers = torch.randn(data.shape[:2]).half()
        numbers.view(-1)[::5] *= 1e-6
        numbers.view(-1)[::7] = -0.0
        data[:, :, start : start + 2] = numbers[..., None].view(torch.uint8)
    return BlockRows(name, data.flatten(1), torch.randperm(num_rows))


def packed(weight: BlockedWeight | JoinedWeight) -> list[Tensor]:
    return NativeCodedLinear(weight, None)._kept


def test_each_type_of_codes_is_packed() -> None:
    assert set(native.BLOCK_TYPES) == set(CODE_FORMATS)


@of_all
@pytest.mark.parametrize("num_threads", [1, 2])
def test_blocks_are_packed_as_their_codes_are(type_name: str, num_threads: int) -> None:
    torch.manual_seed(0)
    pieces, before = (rows(type_name, 37), rows(type_name, 64)), native.num_threads()
    native.set_num_threads(num_threads)
    try:
        for order in (None, torch.randperm(101), torch.randperm(101)[:64]):
            weight = BlockedWeight(type_name, torch.bfloat16, pieces, order)
            (of_blocks,) = packed(weight)
            (of_codes,) = NativeCodedLinear(weight.coded(slice(None)), None)._kept
            assert of_blocks.any()
            assert torch.equal(of_blocks, of_codes)
    finally:
        native.set_num_threads(before)


@of_all
def test_rows_are_those_of_all_pieces_in_order(type_name: str) -> None:
    pieces, order = (rows(type_name, 5), rows(type_name, 3)), torch.randperm(8)
    whole = torch.cat([BlockedWeight(type_name, torch.float32, (its,)).values(slice(None)) for its in pieces])
    weight = BlockedWeight(type_name, torch.float32, pieces, order)
    assert weight.shape == (8, 512)
    assert torch.equal(weight.values(slice(None)), whole[order])
    assert torch.equal(weight.values(slice(3, 7)), whole[order][3:7])


def test_several_types_are_joined() -> None:
    parts = tuple(BlockedWeight(name, torch.float32, (rows(name, 32),)) for name in native.BLOCK_TYPES)
    of_codes = [NativeCodedLinear(part.coded(slice(None)), None)._kept[0] for part in parts]
    assert all(map(torch.equal, packed(JoinedWeight(parts)), of_codes))


@of_all
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_with_the_name_of_the_part(type_name: str, bad: float) -> None:
    for start in HALVES[type_name]:
        good, damaged = rows(type_name, 40), rows(type_name, 40, "b")
        at = 39, BLOCKS[type_name].num_bytes + start
        damaged.data[at[0], at[1] : at[1] + 2] = torch.tensor([bad]).half().view(torch.uint8)
        weight = BlockedWeight(type_name, torch.float32, (good, damaged))
        with pytest.raises(InvalidCheckpointError) as caught:
            packed(weight)
        assert str(caught.value) == f"b is in GGUF's {type_name}, which takes finite numbers, got others"
        with pytest.raises(InvalidCheckpointError, match="takes finite numbers"):
            weight.values(slice(None))
