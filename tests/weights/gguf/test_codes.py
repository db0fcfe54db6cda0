"""Weights of GGUF files as codes: bit for bit what they are unpacked to, fused and permuted matrices, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.inventory import code_formats
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat
from gptserve.weights.source import resolve_model
from tests.parity.models import write_model
from tests.weights.gguf.test_architectures import MODELS
from tests.weights.gguf.written import write_gguf

FORMATS = {
    GGMLQuantizationType.Q4_0: CodeFormat(4, "scales"),
    GGMLQuantizationType.Q4_1: CodeFormat(4, "scales and leasts"),
    GGMLQuantizationType.Q8_0: CodeFormat(8, "scales"),
}
CASES = [
    *((name, GGMLQuantizationType.Q4_1) for name in ("Llama", "GPT-2", "Mixtral")),
    *((name, its) for name in ("GPT-NeoX", "Qwen3") for its in FORMATS),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "quant"), CASES, ids=lambda value: getattr(value, "name", value))
def test_codes_are_what_is_unpacked(name: str, quant: GGMLQuantizationType, tmp_path: Path) -> None:
    write_model(tmp_path, *MODELS[name])
    write_gguf(tmp_path, tmp_path / "model.gguf", quant)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    checkpoint = Checkpoint(folder, load_config(folder))
    formats = checkpoint.code_formats
    assert code_formats(folder, checkpoint.config) == formats
    assert set(formats.values()) == {FORMATS[quant]}
    unpacked = dict(checkpoint.stream(dtype=torch.float32, device="cpu"))
    num_read: list[int] = []
    coded = dict(
        checkpoint.stream(
            dtype=torch.bfloat16, device="cpu", coded=formats, progress=lambda done, total: num_read.append(done)
        )
    )
    assert list(coded) == list(unpacked)
    assert num_read[-1] == checkpoint.num_bytes
    assert any("qkv" in its for its in formats)
    for its in formats:
        weight = coded[its]
        assert isinstance(weight, CodedWeight)
        assert weight.dtype is torch.bfloat16
        assert torch.equal(weight.values(slice(0, weight.shape[0])), unpacked[its])
        assert weight.format.num_bytes(weight.shape) <= weight.shape[0] * weight.shape[1] * 17 // 16
