"""Weights that stay in their files have the rows of those that are made in memory, in any pieces, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.families import load_config
from gptserve.weights.gguf.folder import folder_of
from gptserve.weights.sharding import Share
from gptserve.weights.unread import UnreadWeight
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES
from tests.weights.gguf.written import write_gguf
from tests.weights.quantized.formats import FORMATS, write

PLAIN = (
    "GPT-2, exact gelu, untied",  # transposed
    "GPT-NeoX",  # in another order
    "Llama, biases, own head size, tied",  # joined
    "Mixtral, past its window",  # experts
)
UNREAD = {
    "Mixtral, past its window": "blocks.1.experts.3.ffn_up.weight",
    "GPT-NeoX": "blocks.1.qkv.weight",
}


def compare(folder: Path, dtype: torch.dtype) -> dict[str, UnreadWeight]:
    """Compare all weights of a folder; return those that were not read."""
    checkpoint, found = Checkpoint(folder, load_config(folder)), dict[str, UnreadWeight]()
    expected = dict(checkpoint.stream(dtype=dtype, device="cpu"))
    for name, weight in checkpoint.stream(dtype=dtype, device="cpu", unread=expected):
        tensor = expected[name]
        assert isinstance(tensor, Tensor)
        if isinstance(weight, Tensor):
            assert torch.equal(weight, tensor)
            continue
        assert isinstance(weight, UnreadWeight)
        found[name] = weight
        assert (weight.shape, weight.dtype, weight.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert torch.equal(weight.whole(), tensor)
        assert weight.whole().is_contiguous()
        num = len(tensor)
        for start, stop in ((0, 1), (num // 3, num - 1), (num - 1, num)):
            rows = weight.rows(slice(start, stop))
            assert rows.is_contiguous()
            assert rows.dtype is dtype
            assert torch.equal(rows, tensor[start:stop])
            assert num == 1 or not torch.equal(rows, tensor.roll(1, 0)[start:stop])
        numbers = torch.tensor([num - 1, 0, num // 2, num - 1])
        assert torch.equal(weight[numbers], tensor[numbers])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_floats_have_the_same_rows(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES[name])
    found = compare(tmp_path, dtype)
    assert {"embed.weight", UNREAD.get(name, "blocks.1.qkv.weight")} <= found.keys()


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FORMATS)
def test_stored_types_have_the_same_rows(name: str, tmp_path: Path) -> None:
    write(tmp_path / "quantized", FORMATS[name])
    assert "blocks.1.ffn_down.weight" in compare(tmp_path / "quantized", torch.bfloat16)


@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox", "gpt2", "mixtral"])
def test_rows_of_other_families_in_a_stored_type(model_type: str, tmp_path: Path) -> None:
    """Those in another order are made in memory."""
    write(tmp_path / "quantized", FORMATS["awq"], model_type)
    found = compare(tmp_path / "quantized", torch.float32)
    assert ("blocks.1.qkv.weight" in found) == (model_type != "gpt_neox")


@pytest.mark.parametrize("quant", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0], ids=str)
def test_rows_of_a_gguf_file(quant: GGMLQuantizationType, tmp_path: Path) -> None:
    write_model(tmp_path / "model", *SHAPES["Llama, biases, own head size, tied"])
    write_gguf(tmp_path / "model", tmp_path / "model.gguf", quant)
    found = compare(folder_of(tmp_path / "model.gguf"), torch.bfloat16)
    assert {"embed.weight", "blocks.1.ffn_down.weight"} <= found.keys()


def test_a_file_of_plain_floats_is_not_copied(tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES["Llama"])
    weights = dict(
        Checkpoint(tmp_path, load_config(tmp_path)).stream(
            dtype=torch.float32, device="cpu", unread=["blocks.0.ffn_down.weight", "blocks.0.qkv.weight"]
        )
    )
    down, qkv = weights["blocks.0.ffn_down.weight"], weights["blocks.0.qkv.weight"]
    assert isinstance(down, UnreadWeight)
    assert isinstance(qkv, UnreadWeight)
    num_queries = 64
    for weight, start, is_there in ((down, 4, True), (qkv, 4, True), (qkv, num_queries - 2, False)):
        first, second = (weight.rows(slice(start, start + 4)) for _ in range(2))
        assert (first.data_ptr() == second.data_ptr()) == is_there
    assert isinstance(weights["blocks.1.qkv.weight"], Tensor)  # as was not asked for


def test_a_rank_with_some_columns_makes_them_in_memory(tmp_path: Path) -> None:
    write_model(tmp_path, *SHAPES["Llama"])
    checkpoint = Checkpoint(tmp_path, load_config(tmp_path), Share(0, 2))
    names = {"blocks.0.attn_out.weight", "blocks.0.qkv.weight"}
    weights = dict(checkpoint.stream(dtype=torch.float32, device="cpu", unread=names))
    assert isinstance(weights["blocks.0.attn_out.weight"], Tensor)
    assert isinstance(weights["blocks.0.qkv.weight"], UnreadWeight)


def test_what_has_no_meaning_is_told_when_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    write(folder, FORMATS["gptq with act-order"])
    path, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj.g_idx"
    tensors = load_file(path)
    assert name in tensors
    save_file(tensors | {name: torch.full((96,), 3, dtype=torch.int32)}, path)
    checkpoint = Checkpoint(folder, load_config(folder))
    names = ["blocks.0.ffn_down.weight", "blocks.1.ffn_down.weight"]
    weights = dict(checkpoint.stream(dtype=torch.float32, device="cpu", unread=names))
    damaged, whole = (weights[name] for name in names)
    assert isinstance(damaged, UnreadWeight)
    assert isinstance(whole, UnreadWeight)
    message = r"^layers\.0\.mlp\.down_proj\.weight is in GPTQ, which takes groups of inputs in \[0, 3\), got 3 to 3$"
    with pytest.raises(InvalidCheckpointError, match=message):
        damaged.rows(slice(0, 1))
    with pytest.raises(InvalidCheckpointError, match=message):
        damaged[torch.tensor([0])]
    assert whole.rows(slice(0, 1)).shape == (1, 96)
