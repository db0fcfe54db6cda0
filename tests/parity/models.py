"""Random checkpoints of every family, written and run by transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


def write_model(folder: Path, model_type: str, fields: dict[str, Any], **saving: Any) -> None:
    """Write a model of random weights large enough that logits differ clearly and equal ids mean something."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    spread = {} if "initializer_range" in fields else {"initializer_range": 0.2}
    ends = {"eos_token_id": None, "bos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **{**ends, **spread, **fields})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:  # biases, norms and sinks begin as zeros and ones: a mix-up would not be seen
            drawn = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data.copy_(drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
        elif spread and not name.endswith(("conv1d",)):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder, **saving)


def load_in_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
