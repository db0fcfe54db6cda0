"""Random checkpoints of every family, written and run by transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from gptserve.weights.quantized.mxfp4 import packed_shapes


def write_model(folder: Path, model_type: str, fields: dict[str, Any], **saving: Any) -> None:
    """Write a model of random weights large enough that logits differ clearly and equal ids mean something."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    spread = {} if "initializer_range" in fields else {"initializer_range": 0.2}
    ends = {"eos_token_id": None, "bos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **{**ends, **spread, **fields})
        with _without_timm():
            model = _class_of(config).from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:  # biases, norms and sinks begin as zeros and ones: a mix-up would not be seen
            drawn = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data.copy_(drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
        elif spread and not name.endswith(("conv1d",)):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    corrections = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=corrections) * 0.2)
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.rand(buffer.shape, generator=corrections) + 0.5)
    model.save_pretrained(folder, **saving)
    if model_type == "qwen3_vl_moe":
        _transpose_experts(folder)


def _transpose_experts(folder: Path) -> None:
    """Write experts as published, [experts, in, out]: transformers turns them when it loads, but not when it saves."""
    path = folder / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(path).items()
    }
    save_file(turned, path, {"format": "pt"})


def pack_experts(folder: Path) -> None:
    """Put random experts in MXFP4 into the files of a gpt-oss model, as the published ones have them."""
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config_path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}), encoding="utf-8")
    tensors, generator = load_file(weights_path), torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed_shapes(tuple(tensors.pop(name).shape))
        tensors[f"{name}_blocks"] = torch.randint(256, blocks, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, scales, generator=generator, dtype=torch.uint8)
    save_file(tensors, weights_path)


def load_in_transformers(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    # Falcon's eager attention adds ALiBi twice: with the mask and by itself. The original code does once.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    with _without_timm():
        return _class_of(config).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


@contextmanager
def _without_timm() -> Iterator[None]:
    """Leave the eyes of Gemma 3n out, which are timm's: it is not installed, and texts do not pass them."""
    from transformers import AutoModel
    from transformers.models.gemma3n import modeling_gemma3n

    class WithoutEyes:
        @staticmethod
        def from_config(config: Any) -> Any:
            return torch.nn.Identity() if config.model_type == "gemma3n_vision" else AutoModel.from_config(config)

    with mock.patch.object(modeling_gemma3n, "AutoModel", WithoutEyes):
        yield


def _class_of(config: Any) -> Any:
    """Return the class that makes the model, which may also see."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "text_config" in config.sub_configs else AutoModelForCausalLM
