"""Reads generation_config.json: the sampling parameters that a model's authors chose for it.

The server and LLM apply them, and check their ranges. What ends a text is read with config.json, in `families/`.
"""

from __future__ import annotations

from pathlib import Path

from gptserve.weights.errors import InvalidConfigError, shown
from gptserve.weights.json_file import read_json_object

FILE_NAME = "generation_config.json"
MAX_NEW_TOKENS = "max_new_tokens"
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that mean the same here, in vLLM and in transformers; vLLM reads the same ones, and max_new_tokens."""


def load_sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the SAMPLING_DEFAULTS and max_new_tokens that the file has; none without a file.

    Whole numbers may be written as 20.0. Raises InvalidConfigError if one is no number, or nothing may be answered.
    """
    fields = read_json_object(folder / FILE_NAME, InvalidConfigError, required=False)
    defaults: dict[str, float] = {}
    for name in (*SAMPLING_DEFAULTS, MAX_NEW_TOKENS):
        value, is_whole = fields.get(name), name in ("top_k", MAX_NEW_TOKENS)
        if value is None:
            continue
        if is_whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            kind = "a whole number" if is_whole else "a number"
            raise InvalidConfigError(f"{FILE_NAME}: {name} must be {kind}, got {shown(value)}")
        if name == MAX_NEW_TOKENS and value < 1:
            raise InvalidConfigError(f"{FILE_NAME}: {name} must be at least 1, got {shown(value)}")
        defaults[name] = 0 if (name, value) == ("top_k", -1) else value  # -1 is vLLM's word for off
    return defaults
