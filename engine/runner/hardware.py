"""Chooses what EngineConfig leaves open: the threads of a step, the device and the type of numbers.

ModelRunner calls it.
"""

from __future__ import annotations

import logging

import torch

from gptserve.engine.backends.cpu import native
from gptserve.engine.config import DType, EngineConfig
from gptserve.engine.errors import InvalidConfigurationError
from gptserve.engine.runner.host_cpus import NVIDIA_DRIVER, usable_cpus
from gptserve.engine.runner.products import product_of

logger = logging.getLogger(__name__)

_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def set_num_threads(config: EngineConfig) -> int:
    """Set and return a rank's maximum threads of a step.

    torch's default heeds OMP_NUM_THREADS but no container's quota.
    """
    num_cpus = usable_cpus()
    num_threads = config.num_threads or min(torch.get_num_threads(), num_cpus)
    num_threads = max(1, num_threads // config.num_local_ranks)
    torch.set_num_threads(num_threads)
    native.set_num_threads(num_threads)
    logger.debug("threads: at most %d a step, on %d usable CPUs", num_threads, num_cpus)
    return num_threads


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device; for "auto" a GPU if torch sees one. Warn if the machine has one that torch does not see."""
    if config.device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if NVIDIA_DRIVER.exists():
            logger.warning(
                "device: 'cpu', which is slower, is used instead of 'cuda': this machine has NVIDIA's driver, but "
                "torch %s sees no CUDA device",
                torch.__version__,
            )
        return torch.device("cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfigurationError("device is 'cuda', but torch sees no CUDA device")
    return torch.device(config.device)


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of weights, activations and cache; "auto" is bf16 where the hardware multiplies it fast."""
    if config.dtype != "auto":
        if config.dtype == "float16" and device.type == "cpu":
            raise InvalidConfigurationError("dtype 'float16' is not supported on the CPU; use 'bfloat16' or 'float32'")
        by_onednn = product_of(device, torch.bfloat16) == "onednn"
        if config.dtype == "bfloat16" and by_onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise InvalidConfigurationError("dtype 'bfloat16' is not supported by this CPU; use 'float32'")
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16
    # Also without such instructions our products in bf16 take half as long as fp32 for few rows, and as long for many,
    # on x86; on ARM nobody has measured.
    is_fast = native.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if is_fast else torch.float32
