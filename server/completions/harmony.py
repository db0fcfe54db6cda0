"""gpt-oss's harmony format: tells the tokens of the text, of the reasoning and of the frame apart.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

Works on token ids, so the text of a message cannot pass for a frame. Knows no requests; `chat.py` makes the channels.
Source of the format: OpenAI cookbook, "OpenAI harmony response format".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from gptserve.server.completions.output import Channel
from gptserve.server.completions.service import Tokenizer

Mark = Literal["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
MARKS: tuple[Mark, ...] = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_NAME_LIMIT = 64  # bytes of a header to hold; its first word is the channel's name


def find_marks(tokenizer: Tokenizer) -> dict[int, Mark] | None:
    """Return the special tokens that frame messages, by id; None for a vocabulary without them."""
    ids = [tokenizer.encode_with_special(mark) for mark in MARKS]
    if any(len(found) != 1 or found == tokenizer.encode(mark) for found, mark in zip(ids, MARKS, strict=True)):
        return None
    return {found[0]: mark for found, mark in zip(ids, MARKS, strict=True)}


class HarmonyChannels:
    """Follows one choice token by token. Tokens outside messages or in unknown channels are text."""

    def __init__(self, marks: Mapping[int, Mark]) -> None:
        self._marks = marks
        self._channel: Channel = "text"
        self._header: bytes | None = None  # None: no header is open

    def follow(self, prompt: Sequence[int], tokenizer: Tokenizer) -> HarmonyChannels:
        """Read the last message of a prompt, which the choice continues."""
        start = next(token_id for token_id, mark in self._marks.items() if mark == "<|start|>")
        if start in prompt:
            for token_id in prompt[len(prompt) - 1 - prompt[::-1].index(start) :]:
                self.channel_of(token_id, tokenizer.token_bytes(token_id))
        return self

    def channel_of(self, token_id: int, data: bytes) -> Channel | None:
        """Return the channel of the next token; None for a token of the frame."""
        match self._marks.get(token_id):
            case None:
                if self._header is None:
                    return self._channel
                self._header = (self._header + data)[:_NAME_LIMIT]
            case "<|message|>":
                is_analysis = (self._header or b"").split()[:1] == [b"analysis"]
                self._channel, self._header = "reasoning" if is_analysis else "text", None
            case "<|end|>":
                self._channel, self._header = "text", None
            case _:
                self._header = b""
        return None
