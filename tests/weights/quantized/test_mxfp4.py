"""MXFP4 values, against transformers' own reading of them and against a table written out."""

from __future__ import annotations

import pytest
import torch

from gptserve.weights.quantized.mxfp4 import cut, held_shapes, packed_shapes, unpack


def test_every_value_times_every_power_of_two() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    for exponent in range(252):  # beyond, 6 times the power is more than fp32 holds
        scales = torch.full((1, 16), exponent, dtype=torch.uint8)
        magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        table = magnitudes + [-m for m in magnitudes]
        expected = [table[half] * 2.0 ** (exponent - 127) for byte in range(256) for half in (byte % 16, byte // 16)]
        assert unpack(blocks, scales, torch.float32).flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_equals_what_transformers_unpacks(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks_shape, scales_shape = packed_shapes((3, 64, 10))
    assert (blocks_shape, scales_shape) == ((3, 10, 2, 16), (3, 10, 2))
    blocks = torch.randint(256, blocks_shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, scales_shape, generator=generator, dtype=torch.uint8)

    assert torch.equal(unpack(blocks, scales, dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.mark.parametrize(("width", "group"), [(96, 32), (48, 16), (24, 8), (6, 2)])
def test_inputs_that_are_cut_within_a_group_keep_their_values(width: int, group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks, scales = (
        torch.randint(256, shape, generator=generator, dtype=torch.uint8) for shape in packed_shapes((96, 10))
    )
    whole = unpack(blocks, scales % 250, torch.float32).mT
    assert held_shapes((10, width)) == ((10, width // group, group // 2), (10, width // group))
    for start in range(0, 96, width):
        parts = cut(blocks, scales % 250, start, start + width)
        assert tuple(part.shape for part in parts) == held_shapes((10, width))
        assert torch.equal(unpack(*parts, torch.float32).mT, whole[:, start : start + width])


def test_inputs_that_would_be_cut_within_a_byte_are_not_held() -> None:
    assert held_shapes((10, 3)) is None
