"""What blocks mean: bit for bit what the package gguf makes of random ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from gptserve.weights.gguf.block_sizes import BLOCKS, FILE_TYPES, FLOATS
from gptserve.weights.gguf.blocks import UNPACK
from gptserve.weights.quantized.gguf import CODE_FORMATS, Gguf

NUM_BLOCKS = 3000
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()},
}
"""Where a block has numbers in fp16, which are to be finite."""


def random_blocks(name: str) -> np.ndarray:
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (NUM_BLOCKS, BLOCKS[name].num_bytes), np.uint8)
    for at in HALVES[name]:
        data[:, at : at + 2] = random.normal(size=(NUM_BLOCKS, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        data[:, 0] %= 255  # 255 is not a number
    return data


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [*UNPACK, *CODE_FORMATS])
def test_blocks_mean_what_the_library_says(name: str) -> None:
    data = random_blocks(name)
    with np.errstate(over="ignore"):  # a scale of MXFP4 may be infinite
        expected = dequantize(data, GGMLQuantizationType[name])
    shape = expected.shape
    found = Gguf(name).unpack(shape, {"": torch.from_numpy(data)}, slice(0, len(data)), torch.float32)
    assert torch.equal(found.view(torch.int32), torch.tensor(expected.view(np.int32)))
    assert len(np.unique(expected)) > 100


def test_the_sizes_are_those_of_the_library() -> None:
    assert UNPACK.keys() | CODE_FORMATS.keys() | set(FLOATS) == BLOCKS.keys()
    assert not UNPACK.keys() & CODE_FORMATS.keys()
    for name, block in BLOCKS.items():
        assert (block.num_elements, block.num_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    known = {its_type.value: its_type.name for its_type in GGMLQuantizationType}
    assert {number: known[number] for number in FILE_TYPES} == FILE_TYPES
