"""modelopt, NVIDIA's tool: weights in NVFP4 or in FP8 with one scale each. nvfp4.py and fp8.py read them.

config.json has its section, or hf_quant_config.json has one.
"""

from __future__ import annotations

from gptserve.weights.quantized.codes import read_choice
from gptserve.weights.quantized.fp8 import Fp8
from gptserve.weights.quantized.nvfp4 import MODELOPT_NVFP4
from gptserve.weights.quantized.stored_type import StoredType
from gptserve.weights.raw_config import RawConfig

ALGORITHMS = ("nvfp4", "fp8")


def read_modelopt(section: RawConfig) -> tuple[StoredType, ...]:
    """Return the type."""
    algorithm = read_choice(section, "quant_algo", ALGORITHMS)
    return (MODELOPT_NVFP4,) if algorithm == "nvfp4" else (Fp8(None),)
