"""Weights of quantized folders as codes: bit for bit what they are unpacked to; others say why they are unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptserve.engine.backends.cpu.linear import NativeCodedLinear
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from tests.engine.backends.cpu.coded import product
from tests.weights.quantized import packers
from tests.weights.quantized.formats import FORMATS, INT8, Format, compressed, gptq, group, write
from tests.weights.quantized.test_quantized import stream

ZEROS_4, ZEROS_8 = CodeFormat(4, "scales and zeros"), CodeFormat(8, "scales and zeros")
SCALES_4, SCALES_8 = CodeFormat(4, "scales"), CodeFormat(8, "scales")
OTHERS = {
    "gptq, symmetric": Format(gptq(), packers.gptq(symmetric=True)),
    "gptq v2 of 8 bits, symmetric": Format(
        gptq(bits=8, group_size=64, checkpoint_format="gptq_v2"), packers.gptq(8, 64, version=2, symmetric=True)
    ),
    "gptq of 8 bits and 32": Format(gptq(bits=8), packers.gptq(8)),
    "gptq of large groups": Format(gptq(group_size=128), packers.gptq(group_size=128)),
    "integers of halves": Format(compressed("int-quantized", group(**INT8)), packers.integers(dtype=torch.bfloat16)),
    "gptq, joined": Format(gptq(), packers.gptq(), {"q_proj": packers.gptq(symmetric=True)}),
}
CASES = FORMATS | OTHERS
FOUND: dict[str, CodeFormat | None] = {
    "gptq": ZEROS_4,
    "gptq of rows": ZEROS_4,
    "gptq of ragged groups": None,
    "gptq with act-order": None,
    "gptq with act-order, others for each": None,
    "gptq of rows with act-order": ZEROS_4,  # which has one group
    "gptq v2": ZEROS_4,
    "gptq, symmetric": SCALES_4,
    "gptq v2 of 8 bits, symmetric": SCALES_8,
    "gptq of 8 bits and 32": ZEROS_8,
    "gptq of large groups": ZEROS_4,
    "gptq, joined": ZEROS_4,
    "awq": ZEROS_4,
    "awq of rows": ZEROS_4,
    "packed": SCALES_4,
    "packed, asymmetric": ZEROS_4,
    "packed of 8 bits": ZEROS_8,
    "packed with act-order": None,
    "integers": None,  # their scales are in fp32
    "integers of halves": SCALES_8,
    "integers, asymmetric": None,
    "floats": None,
    "mlx": CodeFormat(4, "scales and leasts"),
}
"""The format of most weights; None: they are unpacked."""


def written(name: str, folder: Path, model_type: str = "llama") -> tuple[Path, Path]:
    """Return the folder of a format, and that with its floats."""
    return folder, write(folder, CASES[name], model_type)


def check_codes(folder: Path, plain: Path, expected: CodeFormat | None) -> dict[str, Any]:
    """Check that the weights of a folder come as codes that are its floats; return them."""
    checkpoint = Checkpoint(folder, load_config(folder))
    formats = checkpoint.code_formats
    assert formats.get("blocks.1.ffn_up.weight") == formats.get("blocks.0.qkv.weight") == expected
    coded = dict(checkpoint.stream(dtype=torch.float32, device="cpu", coded=formats))
    floats = stream(plain)
    assert coded.keys() == floats.keys()
    for name in formats:
        weight = coded[name]
        assert isinstance(weight, CodedWeight)
        assert weight.format == formats[name]
        assert torch.equal(weight.values(slice(0, weight.shape[0])), floats[name])
    return coded


@pytest.mark.some(3)
@pytest.mark.parametrize("name", FOUND)
def test_codes_are_what_is_unpacked(name: str, tmp_path: Path) -> None:
    check_codes(*written(name, tmp_path / "quantized"), FOUND[name])


@pytest.mark.some(3)
@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("name", ["gptq", "awq", "packed, asymmetric"])
def test_fused_interleaved_and_transposed_projections(name: str, model_type: str, tmp_path: Path) -> None:
    check_codes(*written(name, tmp_path / "quantized", model_type), FOUND[name])


def test_products_have_the_bits_of_their_definition(tmp_path: Path) -> None:
    coded, x = check_codes(*written("gptq, joined", tmp_path / "quantized"), ZEROS_4), torch.randn(5, 64)
    weight = coded["blocks.0.qkv.weight"]
    assert torch.equal(NativeCodedLinear(weight, None)(x), product(x, weight))


@pytest.mark.parametrize(
    ("dtype", "scale", "fits"),
    [
        (torch.bfloat16, 2.0**-17 * 1.5, True),
        (torch.bfloat16, 2.0**-20 * (1 + 2**-7), False),  # a subnormal of fp16 has fewer bits
        (torch.bfloat16, 65536.0, False),
        (torch.float32, 1 + 2.0**-10, True),
        (torch.float32, 1 + 2.0**-11, False),
        (torch.float32, float("nan"), False),
    ],
)
def test_a_scale_that_is_not_in_fp16_leaves_its_weight_unpacked(
    dtype: torch.dtype, scale: float, fits: bool, tmp_path: Path
) -> None:
    folder, _ = written("packed", tmp_path / "quantized")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name].to(dtype)
    tensors[name][-1, -1] = scale
    save_file(tensors, folder / "model.safetensors")
    formats = Checkpoint(folder, load_config(folder)).code_formats
    assert ("blocks.1.ffn_down.weight" in formats) == fits
    assert "blocks.0.ffn_down.weight" in formats
