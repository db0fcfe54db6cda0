"""Reads one JSON object, or a text, from a file that may be missing, broken or hostile.

Every fault raises the error class that the caller names, with one sentence. Knows no meaning of either.
Called by the configuration, the tokenizer files, the chat templates and the checkpoint index.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from gptserve.weights.errors import WeightsError

MAX_BYTES = 2**23  # several times the largest file published but a vocabulary; a config.json is a few kilobytes
MAX_VOCABULARY_BYTES = 2**26  # twice the largest tokenizer.json published
MAX_VALUES = 2**23  # of a tokenizer.json; four times the largest. As lists and objects they take 0.6 GB at most
HEAD_BYTES = 2**21  # twice the longest list of added tokens published, Gemma's
MAX_DEPTH = 64  # no file published reaches 20; Python's own functions end at about 1000


def read_json_object(
    path: Path, error: type[WeightsError], *, required: bool = True, max_bytes: int = MAX_BYTES
) -> dict[str, object]:
    """Return the object in `path`; raise `error` when there is none. Unless `required`, a missing file is empty."""
    if not required and not path.exists():
        return {}
    if not path.is_file():
        raise error(f"{path.name} is missing in {path.parent}")
    try:
        _check_size(path, error, max_bytes)
        data = path.read_bytes()
        if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise error(f"{path} must hold at most {MAX_VALUES} values")
        value = json.loads(data)
    except OSError as fault:
        raise error(f"{path} could not be read: {fault.strerror}") from fault
    except (ValueError, RecursionError) as fault:  # ValueError: not UTF-8, not JSON, or a number of too many digits
        raise error(f"{path} is not valid JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, got a {type(value).__name__}")
    if _is_deeper(value, MAX_DEPTH):
        raise error(f"{path} must nest at most {MAX_DEPTH} lists and objects in one another")
    return value


def read_leading_list(path: Path, name: str, error: type[WeightsError], *, max_bytes: int = MAX_BYTES) -> list[object]:
    """Return the list `name` of the object in `path`; an empty one if there is no such list. Raises `error`.

    A list near the file's beginning is read alone: the vocabulary behind it takes long.
    """
    with suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        return _leading_list(file.read(HEAD_BYTES).decode("utf-8", errors="ignore"), name)
    value = read_json_object(path, error, max_bytes=max_bytes).get(name)
    return value if isinstance(value, list) else []


def _leading_list(text: str, name: str) -> list[object]:
    """Return a list of the object that the text begins with. Raises ValueError or RecursionError."""
    decode, at = json.JSONDecoder().raw_decode, _after("[{]", text, 0)
    while True:
        key, at = decode(text, at)
        value, at = decode(text, _after(":", text, at))
        if key == name and isinstance(value, list):
            return value
        at = _after(",", text, at)


def _after(symbol: str, text: str, at: int) -> int:
    """Return where the text goes on behind the symbol at `at` and the blanks around it. Raises ValueError."""
    found = re.compile(rf"[ \t\n\r]*{symbol}[ \t\n\r]*").match(text, at)
    if found is None:
        raise ValueError(f"no {symbol} at {at}")
    return found.end()


def read_text(path: Path, error: type[WeightsError], *, max_bytes: int = MAX_BYTES) -> str:
    """Return the text in `path`; raise `error` when it cannot be read."""
    try:
        _check_size(path, error, max_bytes)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise error(f"{path} could not be read as UTF-8: {fault}") from fault


def _check_size(path: Path, error: type[WeightsError], max_bytes: int) -> None:
    size = path.stat().st_size
    if size > max_bytes:
        raise error(f"{path} must be at most {max_bytes} bytes, got {size}")


def _is_deeper(value: dict[str, object], depth: int) -> bool:
    level: list[dict[str, object] | list[object]] = [value]
    for _ in range(depth):
        children = (node.values() if type(node) is dict else node for node in level)
        level = [child for some in children for child in some if type(child) is list or type(child) is dict]
        if not level:
            return False
    return True
