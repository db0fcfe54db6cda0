"""The error of a command that fails; `main.py` prints it and exits."""

from __future__ import annotations


class CommandError(Exception):
    """A command failed; the message is the cause in one sentence."""
