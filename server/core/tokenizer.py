"""The tokenizer as the server sees it: `weights/tokenizers/tokenizer.py` has it, tests have others."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """The part of weights.tokenizers.tokenizer.Tokenizer that the server uses."""

    max_token_bytes: int
    """The number of bytes of the longest token."""
    special_ids: frozenset[int]
    """The ids of the tokens that have no text."""
    fingerprint: str
    """Changes with the bytes of any token."""
    has_workers: bool
    """Whether a text of any length may take long."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the special tokens that begin or end a prompt."""

    def encode_with_special(self, text: str, *, template: bool = False) -> list[int]:
        """Return the token ids of `text`; the name of a special token in it becomes that token.

        With `template` add the special tokens that begin or end a prompt.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""

    def close(self) -> None:
        """End its worker processes, if it has any."""
