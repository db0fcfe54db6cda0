"""The rotary fields of config.json from a GGUF file's keys, and from the factors that Llama 3.1 and LongRoPE have.

Torch-free. architectures.py and dense.py call it.
"""

from __future__ import annotations

import math
import struct

from gptserve.weights.errors import InvalidCheckpointError, UnsupportedModelError, shown
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.reader import Header, shortest

LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""Those of all published Llamas since 3.1: a file has only the factors that follow from them."""
_TOLERANCE = 1e-4
_ENDLESS = 1e20
"""A wave so many times as long as another one turns no head within any text."""
MAX_FACTORS = 2**12


def head_size(keys: Keys) -> int:
    """Return the size of a head of queries."""
    return keys.size("attention.key_length", max(1, keys.size("embedding_length") // keys.num_heads))


def rope_fields(keys: Keys) -> Fields:
    """Return rope_theta, partial_rotary_factor and rope_scaling.

    Raises UnsupportedModelError for a kind of scaling that is not known.
    """
    header, size = keys.header, head_size(keys)
    theta, num_rotated = keys.number("rope.freq_base", 10000.0), keys.size("rope.dimension_count", size)
    if num_rotated > size:
        raise keys.fault("rope.dimension_count", f"at most {size}, the size of a head")
    fields: Fields = {"rope_theta": theta, "partial_rotary_factor": num_rotated / size}
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    kind = keys.get("rope.scaling.type") or ("none" if factor == 1.0 else "linear")
    if kind == "linear":
        fields["rope_scaling"] = {"rope_type": kind, "factor": factor}
    elif kind == "yarn":
        fields["rope_scaling"] = _yarn(keys, factor)
    elif kind not in ("none", "longrope"):
        raise UnsupportedModelError(f"{keys.fault('rope.scaling.type', 'none, linear, yarn or longrope')}")
    if "rope_factors_short.weight" in header.tensors:  # of LongRoPE, whatever its key says
        names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
        fields["rope_scaling"] = {"rope_type": "longrope"} | {name: _vector(header, of) for name, of in names.items()}
    if "rope_freqs.weight" in header.tensors:
        fields["rope_scaling"] = _llama3(header, theta)
    return fields


def rope_by_kind(keys: Keys) -> Fields:
    """Return rope_parameters, in which only layers without windows are scaled."""
    wide, size = rope_parameters(keys), head_size(keys)
    num_rotated = keys.size("rope.dimension_count_swa", keys.size("rope.dimension_count", size))
    plain = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa", wide["rope_theta"]),
        "partial_rotary_factor": num_rotated / size,
    }
    return {"rope_parameters": {"full_attention": wide, "sliding_attention": plain}}


def rope_in_proportion(keys: Keys, near: int) -> Fields:
    """Return rope_parameters of layers with windows, whose heads are of size `near`, and of others.

    Of the others only a share of the head turns, whose frequencies are those of the whole: a file has factors of the
    wavelengths, 1 and then some that are as good as infinite. Raises InvalidCheckpointError.
    """
    size, name = head_size(keys), "rope_freqs.weight"
    for key, its in (("rope.dimension_count", size), ("rope.dimension_count_swa", near)):
        keys.only(key, its, "whole heads turn")
    factors = _vector(keys.header, name) if keys.has(name) else [1.0] * (size // 2)
    num = factors.count(1.0)
    if len(factors) != size // 2 or not num or factors != [1.0] * num + [max(factors)] * (len(factors) - num):
        raise InvalidCheckpointError(f"{keys.header.path}: {name} must have {size // 2} factors, 1 and then another")
    if num < len(factors) and max(factors) < _ENDLESS:
        raise InvalidCheckpointError(f"{keys.header.path}: {name} must have no factor but 1 below {_ENDLESS:g}")
    wide = {
        "rope_type": "proportional",
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "partial_rotary_factor": num / len(factors),
    }
    plain = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    return {"rope_parameters": {"full_attention": wide, "sliding_attention": plain}}


def rope_parameters(keys: Keys) -> Fields:
    """Return the rotary fields as newer files of config.json have them, in one section."""
    fields = rope_fields(keys)
    return {"rope_type": "default", **fields.pop("rope_scaling", {}), **fields}


def _yarn(keys: Keys, factor: float) -> Fields:
    """Return the scaling as YaRN has it. Raises InvalidConfigError for settings that are not read."""
    keys.only("rope.scaling.yarn_ext_factor", 1.0, "in all published files")
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    more = {name: keys.number(f"rope.scaling.{key}") for name, key in names.items() if keys.get(f"rope.scaling.{key}")}
    context = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    if all_dims := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
        more |= {"mscale": 1.0, "mscale_all_dim": all_dims}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context, **more}


def _vector(header: Header, name: str) -> list[float]:
    """Return a tensor of few numbers. Raises InvalidCheckpointError."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        raise InvalidCheckpointError(f"{header.path}: {name} must be a vector in F32 of at most {MAX_FACTORS} numbers")
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return [shortest(factor) for factor in struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0]))]


def _llama3(header: Header, theta: object) -> Fields:
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
