"""Mixers of Mamba-2: what the families that have them read alike. Families call it; it knows no model_type.

Dao and Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from gptserve.weights.config import ModelConfig, StateSpace
from gptserve.weights.families import layout
from gptserve.weights.families.family import MAX_WIDTH, RawConfig, Source

MAX_CONV_SIZE = 64
_MAX_FACTORS = 2**22
"""Of a mixer's convolutions, far above any model: each has a number in the order of rows."""
_INFINITE = {"__float__": "Infinity"}
"""As transformers writes it."""


def read_step_limits(raw: RawConfig, name: str) -> tuple[float, float]:
    """Return the least step and the largest, by default any."""
    value = raw.value(name, [0.0, math.inf])
    limits = [math.inf if limit == _INFINITE else limit for limit in value] if isinstance(value, list) else []
    if len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits) or not 0 <= limits[0] <= limits[1]:
        raise raw.error(name, "a list of two numbers, of which the first is at least 0 and the second no less")
    return float(limits[0]), float(limits[1])


def read_space(raw: RawConfig, width: int, *, norm_eps: float, has_norm: bool = True) -> StateSpace:
    """Return the mixer of values of this width, by the names that Granite 4 and Falcon-H1 have of its sizes.

    Raises InvalidConfigError.
    """
    num_heads, num_groups = raw.size("mamba_n_heads", default=128), raw.size("mamba_n_groups", default=1)
    if num_heads % num_groups or width % num_heads:
        raise raw.error("mamba_n_heads", f"a multiple of mamba_n_groups ({num_groups}) and a divisor of {width}")
    if raw.value("mamba_d_head", "auto") not in ("auto", width // num_heads):
        raise raw.error("mamba_d_head", f'"auto" or {width // num_heads}')
    space = StateSpace(
        num_groups,
        num_heads,
        key_size=raw.size("mamba_d_state", default=256, limit=MAX_WIDTH),
        value_size=width // num_heads,
        conv_size=raw.size("mamba_d_conv", default=4, limit=MAX_CONV_SIZE),
        norm_eps=norm_eps,
        step_limits=read_step_limits(raw, "time_step_limit"),
        has_conv_bias=raw.boolean("mamba_conv_bias", default=False),
        has_norm=has_norm,
    )
    return check_mixer(raw, "mamba_n_heads", space)


def check_mixer(raw: RawConfig, heads: str, space: StateSpace) -> StateSpace:
    """Return the mixer, whose number of heads the file has by the name `heads`. Raises InvalidConfigError."""
    num = space.conv_width * space.conv_size
    if num > _MAX_FACTORS:
        raise raw.error(heads, f"such that convolutions have at most {_MAX_FACTORS} factors, not {num}")
    return space


def with_mixers(
    others: Callable[[ModelConfig], dict[str, Source]], mixer: str
) -> Callable[[ModelConfig], dict[str, Source]]:
    """Return `others` with the mixers of the layers that have them; `mixer` is their name, with {} for the layer's."""

    def sources(config: ModelConfig) -> dict[str, Source]:
        found = others(config)
        for number, layer in enumerate(config.layers):
            if isinstance(layer.recurrence, StateSpace):
                stored = mixer.format(number)
                found |= mixer_sources(layer.recurrence, f"blocks.{number}.memory_", f"{stored}.", config.hidden_size)
        return layout.in_order(found)

    return sources


def mixer_sources(space: StateSpace, name: str, stored: str, hidden: int) -> dict[str, Source]:
    """Return the tensors of a mixer. A file has gates, values, keys, queries and steps in one matrix, in this order."""
    width, heads, size = space.value_width, space.num_value_heads, space.conv_size
    projected = [(f"{stored}in_proj", width + space.conv_width + heads)]
    rows: dict[str, Sequence[int]] = {"in": _channels(space, width), "gate": range(width)}
    rows["rates"] = _range(width + space.conv_width, heads)
    found = dict[str, Source]()
    for part, order in rows.items():
        found |= layout.linear(f"{name}{part}", projected, hidden, bias=False, row_order=tuple(order))
    factors = ((f"{stored}conv1d.weight", (space.conv_width, 1, size)),)
    found[f"{name}conv.weight"] = Source(factors, row_order=_factors(space), is_wide=True, is_flat=True)
    if space.has_conv_bias:
        biases = ((f"{stored}conv1d.bias", (space.conv_width,)),)
        found[f"{name}conv.bias"] = Source(biases, row_order=_channels(space), is_wide=True)
    for part, its_name in {"decay": "A_log", "step": "dt_bias", "skip": "D"}.items():
        found[f"{name}{part}"] = Source(((f"{stored}{its_name}", (heads,)),), is_wide=True)
    if space.has_norm:
        found[f"{name}norm.weight"] = Source(((f"{stored}norm.weight", (width,)),))
    return found | layout.linear(f"{name}out", [(f"{stored}out_proj", hidden)], width, bias=False)


@cache
def _channels(space: StateSpace, first: int = 0) -> tuple[int, ...]:
    """Return the order of channels: queries, keys and values, which a file has the other way round from `first` on."""
    parts = [(space.value_width + space.key_width, space.key_width), (space.value_width, space.key_width)]
    return _joined([_range(first + start, num) for start, num in [*parts, (0, space.value_width)]])


@cache
def _factors(space: StateSpace) -> tuple[int, ...]:
    """Return the same order of all factors of the channels."""
    return _joined([_range(channel * space.conv_size, space.conv_size) for channel in _channels(space)])


def _range(start: int, num: int) -> range:
    return range(start, start + num)


def _joined(ranges: Sequence[range]) -> tuple[int, ...]:
    return tuple(number for its in ranges for number in its)
