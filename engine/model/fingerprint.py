"""The name of the numbers an engine computes: answers of equal fingerprint, request and seed are equal.

It joins what is known to decide the numbers with a sample of them, for no list of causes is complete: environment
variables steer the libraries, too. Called by ModelRunner.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import replace

import torch
from torch import Tensor

from gptserve.engine.attention import AttentionBackend
from gptserve.weights.config import ModelConfig


def numeric_causes(
    weights_digest: str, model: ModelConfig, device: torch.device, dtype: torch.dtype, backend: AttentionBackend
) -> dict[str, str]:
    """Return what decides the numbers, by name. The number of threads and the sizes of batch and cache do not."""
    shape = replace(model, eos_token_ids=(), bos_token_id=None)  # these end a text and change no number
    return {
        "weights": weights_digest,
        "shape": repr(shape),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(dtype),
        "attention": f"{backend.name} {backend.build}",
        "torch": torch.__version__,
        "libraries and instructions": torch.__config__.show(),
        "precision of products": torch.get_float32_matmul_precision(),
        "gptserve": _version(),
    }


def digest_of(logits: Tensor) -> str:
    """Return the digest of every bit of fp32 logits."""
    return hashlib.sha256(logits.cpu().contiguous().numpy().tobytes()).hexdigest()


def fingerprint(causes: dict[str, str], sample: str) -> str:
    """Return what changes with each of the causes and with the digest of a sample of the numbers."""
    text = "\0".join(f"{name}={cause}" for name, cause in (causes | {"sample": sample}).items())
    return "gptserve-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _version() -> str:
    try:
        return importlib.metadata.version("gptserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that is not installed
