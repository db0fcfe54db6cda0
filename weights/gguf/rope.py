"""The rotary fields of config.json from a GGUF file's keys, and from the factors that Llama 3.1 and LongRoPE have.

Torch-free. architectures.py calls it.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from gptserve.weights.errors import InvalidCheckpointError, UnsupportedModelError, shown
from gptserve.weights.gguf.reader import Header, shortest

LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""Those of all published Llamas since 3.1: a file has only the factors that follow from them."""
_TOLERANCE = 1e-4
MAX_FACTORS = 2**12


def rope_fields(header: Header, architecture: str) -> dict[str, Any]:
    """Return rope_theta and rope_scaling. Raises UnsupportedModelError for a kind of scaling that is not known."""
    keys = {
        name.removeprefix(f"{architecture}.rope."): value
        for name, value in header.keys.items()
        if name.startswith(f"{architecture}.rope.")
    }
    theta = keys.get("freq_base", 10000.0)
    fields: dict[str, Any] = {"rope_theta": theta}
    kind, factor = keys.get("scaling.type", "none"), keys.get("scaling.factor", keys.get("scale_linear", 1.0))
    if kind == "none" and isinstance(factor, float) and factor != 1.0:
        kind = "linear"
    if kind in ("linear", "yarn"):
        fields["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            fields["rope_scaling"]["original_max_position_embeddings"] = keys.get("scaling.original_context_length")
    elif kind not in ("none", "longrope"):
        raise UnsupportedModelError(f"{header.path}: {architecture}.rope.scaling.type {shown(kind)} is not read")
    if "rope_factors_short.weight" in header.tensors:  # of LongRoPE, whatever its key says
        names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
        fields["rope_scaling"] = {"rope_type": "longrope"} | {name: _vector(header, of) for name, of in names.items()}
    if "rope_freqs.weight" in header.tensors:
        fields["rope_scaling"] = _llama3(header, theta)
    return fields


def _vector(header: Header, name: str) -> list[float]:
    """Return a tensor of few numbers. Raises InvalidCheckpointError."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        raise InvalidCheckpointError(f"{header.path}: {name} must be a vector in F32 of at most {MAX_FACTORS} numbers")
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return [shortest(factor) for factor in struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0]))]


def _llama3(header: Header, theta: object) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 that has these factors of the wavelengths. Raises UnsupportedModelError."""
    factors = _vector(header, "rope_freqs.weight")
    if not isinstance(theta, float) or theta <= 0:
        raise InvalidCheckpointError(f"{header.path}: rope_freqs.weight needs a base above 0, got {shown(theta)}")
    factor = max(factors)
    if not 0 < factor < math.inf:
        raise InvalidCheckpointError(
            f"{header.path}: rope_freqs.weight must have finite factors above 0, got {factor:g}"
        )
    for i, found in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (i / len(factors))
        smooth = (ORIGINAL_CONTEXT / wavelength - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
        smooth = min(1.0, max(0.0, smooth))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not abs(found - expected) <= _TOLERANCE * expected:
            raise UnsupportedModelError(
                f"{header.path}: rope_freqs.weight has factors that are not those of Llama 3.1, got {found:g} at {i}"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
