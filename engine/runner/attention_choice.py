"""Which attention backend computes a model on its device, and why a slower one does.

ModelRunner calls `choose_backend` before it loads weights. Backends are imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptserve.engine.backends.fallback import warn_of_fallback
from gptserve.engine.backends.gpu.device_loss import end_if_lost
from gptserve.engine.config import AttentionBackendName, EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.model.attention import AttentionBackend, AttentionSpec


def choose_backend(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[AttentionSpec],
    max_position: int,
) -> AttentionBackend:
    """Return config.attention_backend; for "auto" the fastest that can compute these layers on this device.

    Raises InvalidConfigurationError if the named one cannot, EngineStartError if the GPU cannot go on after trying it.
    "auto" warns if it chooses the reference, which is slower.
    """
    from gptserve.engine.backends.reference.attention import ReferenceAttention

    name = config.attention_backend
    if config.kv_cache_dtype == "int8" and device.type != "cpu":
        raise InvalidConfigurationError(f"kv_cache_dtype 'int8' is computed on a CPU only, got device '{device.type}'")
    if name == "reference":
        return ReferenceAttention()
    fast: AttentionBackendName = "cpu" if device.type == "cpu" else "triton"
    if name not in ("auto", fast):
        raise InvalidConfigurationError(f"attention_backend '{name}' cannot be used: the device is {device}")
    if fast == "cpu":
        found = _on_cpu(dtype, {spec.head_size for spec in specs})
    else:
        max_model_len = config.max_model_len or max_position
        found = _on_gpu(device, dtype, specs, config.block_size, max_model_len, exact=config.batch_invariant)
    if not isinstance(found, str):
        return found
    if name == fast:
        raise InvalidConfigurationError(f"attention_backend '{name}' cannot be used: {found}")
    warn_of_fallback("attention", "'reference', which is slower, is", f"'{fast}'", found)
    return ReferenceAttention()


def _on_cpu(dtype: torch.dtype, head_sizes: set[int]) -> AttentionBackend | str:
    """Return the compiled kernel, or why it cannot be used."""
    from gptserve.engine.backends.cpu.attention import SUPPORTED_DTYPES, CpuAttention

    if dtype not in SUPPORTED_DTYPES or any(size % 8 for size in head_sizes):
        sizes = ", ".join(map(str, sorted(head_sizes)))
        return f"it computes fp32 and bf16 with head sizes divisible by 8, this is {dtype} with {sizes}"
    if not CpuAttention.is_available():
        return "its library is missing or stale: the installation compiles it where there is a C++ compiler"
    return CpuAttention()


def _on_gpu(
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[AttentionSpec],
    block_size: int,
    max_model_len: int,
    *,
    exact: bool,
) -> AttentionBackend | str:
    """Return the Triton kernel if it computes these layers as the reference does, or why it cannot be used.

    If `exact`, the bits of a row must not depend on its step, either.
    """
    from gptserve.engine.backends.gpu.attention import TritonAttention
    from gptserve.engine.backends.gpu.selfcheck.attention import disagreement, shapes_of
    from gptserve.engine.backends.gpu.selfcheck.proofs import proofs_of

    if not TritonAttention.is_available():
        return "Triton is not installed"
    try:
        backend = TritonAttention(exact=exact)
        found = proofs_of(device).disagreement(
            "attention",
            (shapes_of(specs), dtype, block_size, max_model_len, exact),
            lambda: disagreement(backend, specs, device, dtype, block_size, max_model_len, exact=exact),
        )
    except Exception as error:  # of a compiler, a driver or a GPU that Triton does not know: the reference needs none
        end_if_lost("attention's Triton kernel", error, "attention_backend 'reference'")
        return f"it failed with {type(error).__name__}: {error}"
    return backend if found is None else found
