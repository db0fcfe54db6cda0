"""Mixtures of experts in files: corrections keep their numbers, shared experts are cut, and odd sizes are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.errors import InvalidConfigError, UnsupportedModelError
from gptserve.weights.families import load_config
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

DOTS = SHAPES["dots.llm1"]
STORED = "model.layers.1.mlp."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of dots.llm1 with two shared experts."""
    folder: Path = tmp_path_factory.mktemp("dots")
    write_model(folder, *DOTS)
    return folder


def test_corrections_stay_in_fp32_and_shared_experts_are_parts_of_one_feed_forward(folder: Path) -> None:
    config = load_config(folder)
    stored = load_file(folder / "model.safetensors")
    tensors = dict(Checkpoint(folder, config).stream(dtype=torch.bfloat16, device=torch.device("cpu")))

    correction = tensors["blocks.1.router.correction"]
    assert correction.dtype is torch.float32
    assert torch.equal(correction, stored[f"{STORED}gate.e_score_correction_bias"])
    assert not torch.equal(correction, correction.bfloat16().float())
    gate, up, down = (
        stored[f"{STORED}shared_experts.{part}_proj.weight"].bfloat16() for part in ("gate", "up", "down")
    )
    experts = config.layers[1].experts
    assert experts is not None
    for i, rows in enumerate((slice(0, 32), slice(32, 64))):
        name = f"blocks.1.experts.{experts.num + i}."
        assert torch.equal(tensors[f"{name}ffn_up.weight"], torch.cat([gate[rows], up[rows]]))
        assert torch.equal(tensors[f"{name}ffn_down.weight"], down[:, rows])


@pytest.mark.parametrize(
    ("name", "fields", "error", "message"),
    [
        (
            "dots.llm1",
            {"n_group": 3},
            InvalidConfigError,
            r"n_group must be a divisor of n_routed_experts \(8\), got 3",
        ),
        ("dots.llm1", {"n_group": 8}, InvalidConfigError, r"n_group must be an integer in \[1, 4\], got 8"),
        ("dots.llm1", {"n_group": 4, "topk_group": 1}, InvalidConfigError, r"num_experts_per_tok must be .* \[1, 2\]"),
        ("dots.llm1", {"scoring_func": "softmax"}, InvalidConfigError, "scoring_func must be one of"),
        ("dots.llm1", {"topk_method": "greedy"}, UnsupportedModelError, 'topk_method must be "noaux_tc", got .greedy'),
        ("MiniMax M2", {"attn_type_list": [0, 1]}, UnsupportedModelError, "attn_type_list"),
        ("MiniMax M2", {"shared_intermediate_size": 64}, UnsupportedModelError, "shared_intermediate_size must be 0"),
        (
            "Qwen2 MoE",
            {"shared_expert_intermediate_size": 80},
            InvalidConfigError,
            r"shared_expert_intermediate_size must be a multiple of moe_intermediate_size \(32\), got 80",
        ),
        ("Qwen2 MoE", {"num_experts": 2**16}, InvalidConfigError, "num_experts must be an integer in"),
        (
            "Granite with shared experts",
            {"shared_intermediate_size": 100},
            InvalidConfigError,
            r"shared_intermediate_size must be a multiple of intermediate_size \(96\), got 100",
        ),
        (
            "Flint, past its window",
            {"shared_expert_intermediate_size": 80},
            InvalidConfigError,
            r"shared_expert_intermediate_size must be a multiple of moe_intermediate_size \(32\), got 80",
        ),
        ("Solar Open", {"use_qk_norm": True}, UnsupportedModelError, "use_qk_norm must be false, got True"),
        ("Hy3", {"qk_norm": False}, UnsupportedModelError, "qk_norm must be true, got False"),
        ("Hy3", {"expert_hidden_dim": 64}, UnsupportedModelError, "expert_hidden_dim must be 32, got 64"),
        (
            "K-EXAONE, past its window",
            {"is_moe_layer": [True] * 4},
            UnsupportedModelError,
            r"is_moe_layer must be \[false, true, true, true\], got",
        ),
        (
            "Mellum 2, past its window",
            {"mlp_layer_types": ["sparse"]},
            InvalidConfigError,
            "mlp_layer_types must be a list of 4, each one of dense, sparse, got",
        ),
        ("ERNIE 4.5 MoE", {"moe_gate": "hash"}, UnsupportedModelError, "moe_gate"),
        ("ERNIE 4.5 MoE", {"moe_layer_start_index": -1}, InvalidConfigError, "moe_layer_start_index must be"),
    ],
)
def test_a_mixture_that_is_none_of_transformers_is_refused(
    name: str, fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model_type, sizes = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **fields}))
    with pytest.raises(error, match=message):
        load_config(tmp_path)


def test_experts_of_one_tensor_are_read_as_published_and_as_transformers_saves_them(tmp_path: Path) -> None:
    """Published as [experts, in, out], saved as [experts, out, in]: transformers turns them only while it loads."""
    write_model(tmp_path, *SHAPES["Qwen3-VL with experts"])
    config = load_config(tmp_path)
    published = dict(Checkpoint(tmp_path, config).stream(dtype=torch.float32, device="cpu"))
    path = tmp_path / "model.safetensors"
    turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in load_file(path).items()}
    assert any(tensor.shape != load_file(path)[name].shape for name, tensor in turned.items())
    save_file(turned, path, {"format": "pt"})
    saved = dict(Checkpoint(tmp_path, config).stream(dtype=torch.float32, device="cpu"))
    assert saved.keys() == published.keys()
    for name, tensor in published.items():
        of_saved = saved[name]
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(of_saved, torch.Tensor)
        assert torch.equal(of_saved, tensor), name
