"""Rotary frequencies from a configuration: the scalings that stretch a model's context, as numbers.

Families call `with_rotary`; the engine only sees the finished Rotary. Torch-free; computed in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gptserve.weights.config import ModelConfig, Rotary
from gptserve.weights.errors import UnsupportedModelError, shown
from gptserve.weights.raw_config import MAX_SIZE, RawConfig

Frequencies = tuple[float, ...]
Scaled = tuple[Rotary, int]
"""Frequencies, and the longest context that they are made for."""

_ORIGINAL = "original_max_position_embeddings"
_UNUSED = ("finetuned", "mrope_section", "mrope_interleaved")
"""How the model was made, and the split of positions for images: text has one position in all three parts."""


def read_rotary(
    raw: RawConfig,
    head_size: int,
    max_position: int,
    *,
    scaling: RawConfig | None = None,
    theta: float = 10_000.0,
    fraction: float = 1.0,
) -> Scaled:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` in older files.

    Return the frequencies and the longest context that they are made for; `max_position` is the file's own figure.
    `scaling` replaces those sections; `theta` and `fraction` are the family's defaults. Raises InvalidConfigError or
    UnsupportedModelError.
    """
    scaling = scaling or _scaling(raw)
    theta = scaling.positive("rope_theta", default=raw.positive("rope_theta", default=theta))
    fraction = scaling.positive(
        "partial_rotary_factor", default=raw.positive("partial_rotary_factor", default=fraction)
    )
    if theta <= 1:
        raise scaling.error("rope_theta", "above 1")
    num_pairs = int(head_size * min(fraction, 2.0)) // 2  # 2, too many, stands for more: that may be beyond any float
    if not 1 <= num_pairs <= head_size // 2:
        raise scaling.error("partial_rotary_factor", f"a share of {head_size} dimensions, at least 2")
    kinds = [scaling.text(name) for name in ("rope_type", "type") if name in scaling]
    kind = kinds[0] if kinds else "default"
    # In proportion to the head, all pairs of which turn: those beyond the fraction by no angle.
    num_all = head_size // 2 if kind == "proportional" else num_pairs
    plain = (*(theta ** (-i / num_all) for i in range(num_pairs)), *(0.0,) * (num_all - num_pairs))
    scaling.skip(*_UNUSED)
    if kind not in _SCALINGS:
        raise UnsupportedModelError(f"config.json: rope_type must be one of {', '.join(_SCALINGS)}, got {shown(kind)}")
    original = raw.size(_ORIGINAL, default=scaling.size(_ORIGINAL, default=max_position))
    if original < 2:
        raise scaling.error(_ORIGINAL, "at least 2")
    return _SCALINGS[kind](scaling, plain, theta, original, max_position)


def with_rotary(
    raw: RawConfig, config: ModelConfig, *, size: int | None = None, theta: float = 10_000.0, fraction: float = 1.0
) -> ModelConfig:
    """Return the configuration with the rotary positions of a head's first `size` dimensions on every layer."""
    head_size = size or config.layers[0].head_size
    rotary, context = read_rotary(raw, head_size, config.max_position, theta=theta, fraction=fraction)
    config = config.change_layers(lambda layer: replace(layer, rotary=rotary))
    return replace(config, position=None, max_position=context)


def with_rotary_by_kind(raw: RawConfig, config: ModelConfig, *, theta: float, local_theta: float) -> ModelConfig:
    """Return the configuration with the rotary positions of either kind of layers: those with and without a window.

    `rope_parameters` has a section for each kind; older files have `rope_scaling`, for the layers without a window. The
    bases are for a file that does not say.
    """
    by_kind = raw.section("rope_parameters")
    everything = by_kind.section("full_attention") if "full_attention" in by_kind else raw.section("rope_scaling")
    local = by_kind.section("sliding_attention")
    context = config.max_position
    sizes = {layer.window is None: layer.head_size for layer in config.layers}
    size, local_size = (sizes.get(kind, config.layers[0].head_size) for kind in (True, False))
    wide, max_position = read_rotary(raw, size, context, scaling=everything, theta=theta)
    narrow, _ = read_rotary(RawConfig({}), local_size, context, scaling=local, theta=local_theta)
    config = config.change_layers(lambda layer: replace(layer, rotary=wide if layer.window is None else narrow))
    return replace(config, position=None, max_position=max_position)


def _scaling(raw: RawConfig) -> RawConfig:
    if "rope_parameters" not in raw:
        return raw.section("rope_scaling")
    section = raw.section("rope_parameters")
    # transformers writes rope_parameters and still reads rope_scaling, so a file may have both.
    parameters, older = raw.value("rope_parameters"), raw.value("rope_scaling")
    if isinstance(parameters, dict) and isinstance(older, dict) and not older.items() <= parameters.items():
        raise UnsupportedModelError(
            f"config.json: rope_scaling must say the same as rope_parameters or be absent, got {shown(older)}"
        )
    return section


def _plain(scaling: RawConfig, plain: Frequencies, theta: float, original: int, max_position: int) -> Scaled:
    """No scaling. "dynamic" would only scale beyond max_position, which no sequence reaches."""
    scaling.skip("factor")
    return Rotary(plain), max_position


def _dynamic(scaling: RawConfig, plain: Frequencies, theta: float, original: int, max_position: int) -> Scaled:
    """No scaling, but by Hunyuan's alpha: its power by d / (d - 2) is a factor of theta, for d rotated dimensions."""
    alpha = scaling.number("alpha")
    if alpha is None:
        return _plain(scaling, plain, theta, original, max_position)
    scaling.skip("factor", *_OF_YARN)
    num = len(plain)
    if num < 2:
        raise scaling.error("alpha", "absent for heads of 2 dimensions")
    return Rotary(tuple(f * alpha ** (-i / (num - 1)) for i, f in enumerate(plain))), max_position


def _linear(scaling: RawConfig, plain: Frequencies, theta: float, original: int, max_position: int) -> Scaled:
    """Position interpolation (Chen et al. 2023): divide every position by the factor."""
    factor = scaling.positive("factor", default=1.0)
    return Rotary(tuple(f / factor for f in plain)), max_position


def _llama3(scaling: RawConfig, plain: Frequencies, theta: float, original: int, max_position: int) -> Scaled:
    """Llama 3.1: stretch long waves, keep short ones, blend those between."""
    factor = scaling.positive("factor", default=8.0)
    low, high = scaling.positive("low_freq_factor", default=1.0), scaling.positive("high_freq_factor", default=4.0)
    if low >= high:
        raise scaling.error("low_freq_factor", f"below high_freq_factor ({high})")

    def blend(f: float) -> float:
        share = min(1.0, max(0.0, (original * f / (2 * math.pi) - low) / (high - low)))
        return share * f + (1 - share) * f / factor

    return Rotary(tuple(map(blend, plain))), max_position


def _yarn(scaling: RawConfig, plain: Frequencies, theta: float, original: int, max_position: int) -> Scaled:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4), for `factor` times the original context, as in vLLM.

    Many files (Qwen2.5 and Qwen3, as their cards tell users to write them) keep the max_position_embeddings of the
    model before it was stretched.
    """
    factor = scaling.positive("factor", default=max_position / original)
    context = original * factor
    if not 1 <= context <= MAX_SIZE:
        raise scaling.error("factor", f"such that factor * {original} tokens are in [1, {MAX_SIZE}]")
    dim = 2 * len(plain)

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_of(scaling.positive("beta_fast", default=32.0))
    last = dimension_of(scaling.positive("beta_slow", default=1.0))
    if scaling.boolean("truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    shares = [min(1.0, max(0.0, (i - first) / (last - first))) for i in range(len(plain))]
    scale = scaling.number("attention_factor")
    m, all_dims = (scaling.number(name) if scaling.value(name) else None for name in ("mscale", "mscale_all_dim"))
    if scale is None:
        scale = _yarn_scale(factor, m) / _yarn_scale(factor, all_dims) if m and all_dims else _yarn_scale(factor)
    return Rotary(tuple((1 - s) * f + s * f / factor for f, s in zip(plain, shares, strict=True)), scale), int(context)


def _yarn_scale(factor: float, m: float = 1.0) -> float:
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(scaling: RawConfig, plain: Frequencies, theta: float, original: int, max_position: int) -> Scaled:
    """LongRoPE (Ding et al. 2024) within the original context: beyond it all keys, cached ones too, need others."""
    short = scaling.numbers("short_factor", length=len(plain))
    scaling.skip("long_factor")
    factor = scaling.positive("factor", default=max_position / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = scaling.positive("attention_factor", default=default)
    rotary = Rotary(tuple(f / divisor for f, divisor in zip(plain, short, strict=True)), scale)
    return rotary, min(max_position, original)


_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Hunyuan's files have them beside alpha, without effect."""

_SCALINGS: dict[str, Callable[[RawConfig, Frequencies, float, int, int], Scaled]] = {
    "default": _plain,
    "dynamic": _dynamic,
    "mrope": _plain,
    "linear": _linear,
    "proportional": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
