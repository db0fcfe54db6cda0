"""Weights of GGUF files as codes: bit for bit what they are unpacked to, fused and permuted matrices, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.families import load_config
from gptserve.weights.families.family import Source
from gptserve.weights.inventory import code_formats
from gptserve.weights.parts import rows_of_parts
from gptserve.weights.quantized.blocked import BlockedWeight
from gptserve.weights.quantized.coded import CodedWeight, CodeFormat, JoinedFormat, JoinedWeight
from gptserve.weights.quantized.gguf import CODE_FORMATS, HALVES, Gguf, GgufHalves
from gptserve.weights.source import resolve_model
from tests.parity.models import write_model
from tests.weights.gguf.k_quants import packed, q4_k_m
from tests.weights.gguf.test_architectures import MODELS
from tests.weights.gguf.written import write_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
Q4_K, Q6_K = CODE_FORMATS["Q4_K"], CODE_FORMATS["Q6_K"]
FORMATS = {GGMLQuantizationType[name]: CODE_FORMATS[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")}
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
    check(checkpoint)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_parts_of_several_types_are_joined_as_they_are(name: str, tmp_path: Path) -> None:
    model_type, settings = MODELS[name]
    write_model(tmp_path, model_type, {**settings, **WIDE})
    write_gguf(tmp_path, tmp_path / "model.gguf", q4_k_m)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    checkpoint = Checkpoint(folder, load_config(folder))
    formats = checkpoint.code_formats
    assert formats["blocks.0.qkv.weight"] == JoinedFormat(((384, Q4_K), (128, Q6_K)))
    assert {its for its in formats.values() if isinstance(its, CodeFormat)} == {Q4_K, Q6_K}
    check(checkpoint)


def test_rows_of_parts_are_joined_unless_they_take_turns() -> None:
    parts = (("queries", (4, 32)), ("keys", (2, 32)))
    rows = {
        None: ([0, 1, 2, 3], [0, 1]),
        (1, 0, 5, 4): ([1, 0], [1, 0]),
        (2, 3, 4): ([2, 3], [0]),
        (5,): ([], [1]),
        (0, 4, 1, 5): None,
        (4, 5, 0): None,
    }
    for order, expected in rows.items():
        found = rows_of_parts(Source(parts, row_order=order))
        assert found == expected if found is None else tuple(map(list, found)) == expected
    assert rows_of_parts(Source(parts[:1], row_order=(3, 0, 2))) == ((3, 0, 2),)


@pytest.mark.parametrize("quant", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K], ids=lambda its: its.name)
@pytest.mark.parametrize("endings", HALVES)
def test_rows_of_two_tensors_may_all_be_in_one(endings: tuple[str, str], quant: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).standard_normal((2, 4, 256)).astype(np.float32)
    blocks = [packed(its, quant) for its in values]
    first, last = (torch.from_numpy(dequantize(its, quant)) for its in blocks)
    whole = torch.cat([first, last]) if endings == HALVES[1] else torch.stack([first, last], 1).flatten(0, 1)
    tensors = {name: torch.from_numpy(its) for name, its in zip(endings, blocks, strict=True)}
    for rows in (slice(0, 2), slice(1, 2), slice(3, 6), slice(4, 8)):
        found = GgufHalves((quant.name, quant.name), endings).unpack((8, 256), tensors, rows, torch.float32)
        assert torch.equal(found, whole[rows])


@pytest.mark.parametrize("quant", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K])
def test_a_vector_shares_blocks(quant: GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    blocks = packed(values, quant)
    expected = torch.from_numpy(dequantize(blocks, quant))[0]
    tensors = {"": torch.from_numpy(blocks[0])}
    for rows in (slice(0, 512), slice(40, 300)):
        assert torch.equal(Gguf(quant.name).unpack((512,), tensors, rows, torch.float32), expected[rows])


def check(checkpoint: Checkpoint) -> None:
    """Check that codes mean what is unpacked, and take the bytes that their formats say."""
    formats = checkpoint.code_formats
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
        assert isinstance(weight, CodedWeight | BlockedWeight | JoinedWeight)
        assert weight.dtype is torch.bfloat16
        assert torch.equal(torch.cat([part.values(slice(None)) for part in weight.parts]), unpacked[its])
        assert formats[its].num_bytes(weight.shape) <= weight.shape[0] * weight.shape[1] * 17 // 16
