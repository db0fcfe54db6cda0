"""The fingerprint of an engine's numbers: equal fingerprint, request and seed give equal tokens.

It hashes the known causes of numeric differences and a sample of logits. No list of causes is complete (environment
variables change what libraries do), so the sample catches the rest. ModelRunner calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import EngineConfig
from gptserve.engine.model.attention import AttentionBackend
from gptserve.engine.model.layout import Span, StepArrays, lay_out
from gptserve.engine.model.operations import Operations
from gptserve.engine.runner.batch_invariance import Products
from gptserve.engine.runner.memory import weight_types
from gptserve.engine.runner.products import Product, build_of, product_of
from gptserve.version import installed_version
from gptserve.weights.checkpoint import Checkpoint
from gptserve.weights.config import ModelConfig
from gptserve.weights.families import load_config
from gptserve.weights.sharding import Share

_PROBE_TOKENS = 8
"""Tokens of the sample: enough for attention over several keys."""


def numeric_causes(
    weights_digest: str,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
    product: Product,
    backend: AttentionBackend,
    operations: Operations,
    products: Products,
    num_ranks: int,
    has_graphs: bool,
    draws: str,
) -> dict[str, str]:
    """Return the causes of numeric differences, by name. Threads and sizes of batch and cache are not among them.

    `product` is what multiplies with most weights. `draws` is what chooses tokens where the compiled library does not.
    """
    shape = replace(model, eos_token_ids=(), bos_token_id=None)  # they end a text and change no logits
    return {
        "weights": weights_digest,
        "shape": repr(shape),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(dtype),
        "KV cache": config.kv_cache_dtype,
        "attention": f"{backend.name} {backend.build}",
        "operations": operations.build,
        "products": build_of(product_of(device, dtype), dtype),
        "products with codes": build_of(product, dtype) if product == "native_coded" else "none",
        "quantized products": ", ".join(
            build_of(product_of(device, dtype, weight_type), dtype)
            for weight_type in weight_types(config.requantization)
            if weight_type is not None
        )
        or "none",
        "rows of products": repr(products),
        "ranks": str(num_ranks),
        "rows of decoding steps": "padded for graphs" if has_graphs else "as many as needed",
        "draws": native.digest() if device.type == "cpu" and native.is_available() else draws,
        "torch": torch.__version__,
        "libraries and instructions": torch.__config__.show(),
        "precision of products": torch.get_float32_matmul_precision(),
        "gptserve": installed_version(),
    }


def weights_digest(config: EngineConfig) -> str:
    """Return the digest of the weights on this machine, by which nodes know that they have the same."""
    return Checkpoint(config.model_dir, load_config(config.model_dir), Share(0, config.tensor_parallel_size)).digest


def sample_numbers(
    logits_of: Callable[[StepArrays, slice], Tensor], vocab_size: int, max_model_len: int, block_size: int
) -> str:
    """Return the digest of the logits of a fixed prompt; call it before any sequence owns a block.

    `logits_of` computes a step and returns the logits of some of its rows.
    """
    num_tokens = min(_PROBE_TOKENS, max_model_len)
    token_ids = [i % vocab_size for i in range(num_tokens)]
    span = Span(token_ids, 0, range(-(-num_tokens // block_size)), num_sampled=1)
    return digest_of(logits_of(lay_out([span], block_size), slice(num_tokens)))


def digest_of(logits: Tensor) -> str:
    """Return a digest of all bits of fp32 logits."""
    return hashlib.sha256(logits.cpu().contiguous().numpy().tobytes()).hexdigest()


def fingerprint(causes: dict[str, str], sample: str) -> str:
    """Return a name that changes with any cause and with `sample`, the digest of some logits."""
    text = "\0".join(f"{name}={cause}" for name, cause in (causes | {"sample": sample}).items())
    return "gptserve-" + hashlib.sha256(text.encode()).hexdigest()[:12]
