"""Reads one JSON object, or a text, from a file that may be missing, broken or hostile.

Every fault raises the error class that the caller names, with one sentence. Knows no meaning of either.
Called by the configuration, the tokenizer files, the chat templates and the checkpoint index.
"""

from __future__ import annotations

import json
from pathlib import Path

from gptserve.weights.errors import WeightsError

SIZE_LIMIT_BYTES = 64 * 2**20  # twice the largest tokenizer.json published; a config.json is a few kilobytes


def read_json_object(path: Path, error: type[WeightsError], *, required: bool = True) -> dict[str, object]:
    """Return the object in `path`; raise `error` when there is none. Unless `required`, a missing file is empty."""
    if not required and not path.exists():
        return {}
    if not path.is_file():
        raise error(f"{path.name} is missing in {path.parent}")
    try:
        size = path.stat().st_size
        if size > SIZE_LIMIT_BYTES:
            raise error(f"{path} must be at most {SIZE_LIMIT_BYTES} bytes, got {size}")
        value = json.loads(path.read_bytes())
    except OSError as fault:
        raise error(f"{path} could not be read: {fault.strerror}") from fault
    except (ValueError, RecursionError) as fault:  # ValueError: not UTF-8, not JSON, or a number of too many digits
        raise error(f"{path} is not valid JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def read_text(path: Path, error: type[WeightsError]) -> str:
    """Return the text in `path`; raise `error` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise error(f"{path} could not be read as UTF-8: {fault}") from fault
