"""The errors of a model on disk. Every message is one sentence that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SHOWN_LENGTH = 80  # of a value in a message: enough to recognise it, and a hostile file cannot flood the log


class WeightsError(Exception):
    """The model cannot be used; the message says which file, the rule and what was found."""


class ModelNotFoundError(WeightsError):
    """No such folder or hub id, or it could not be fetched."""


class UnsupportedModelError(WeightsError):
    """A real model, but not one this decoder can compute."""


class InvalidConfigError(WeightsError):
    """config.json is missing, unreadable or contradicts itself."""


class InvalidCheckpointError(WeightsError):
    """A safetensors file is damaged, or a tensor is missing, unexpected or misshapen."""


class UnsafeCheckpointError(WeightsError):
    """Only pickle files are there; they run code when opened and are never read."""


class TokenizerError(WeightsError):
    """The tokenizer files are missing or cannot be used, or a text has no tokens."""


class ChatTemplateError(WeightsError):
    """The chat template cannot be read, is not valid or refuses a conversation."""


def shown(value: object) -> str:
    """Return `value` as a message shows it: one printable line of bounded length."""
    text = ascii(value)
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 3] + "..."


@contextmanager
def foreign_code(error: type[WeightsError], reason: str) -> Iterator[None]:
    """Raise `error` for all that a library in Rust raises; a panic there is a BaseException."""
    try:
        yield
    except BaseException as fault:
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise
        raise error(f"{reason}: {shown(str(fault))}") from fault
