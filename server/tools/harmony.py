"""gpt-oss's harmony format: tells the tokens of the text, the reasoning, calls of tools and the frame apart.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Works on token ids, so the text of a message cannot pass for a frame. Knows no requests; `tools/dialect.py` makes the
channels. Source of the format: OpenAI cookbook, "OpenAI harmony response format".
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from copy import copy
from typing import Literal

from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.text.output import Channel, Detokenizer
from gptserve.server.tools.parts import Parts

Mark = Literal["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
MARKS: tuple[Mark, ...] = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_HEADER_LIMIT = 256  # bytes to hold; the first word is the channel's name
_FUNCTION = re.compile(rb"(?:^|\s)to=functions\.([a-zA-Z0-9_.-]{1,128})")


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
        self._function: str | None = None  # to which the message goes
        self._parts: Parts | None = None
        self._special_ids: Container[int] = ()
        self._arguments = Detokenizer()
        self._is_call = False

    def follow(self, prompt: Sequence[int], tokenizer: Tokenizer) -> HarmonyChannels:
        """Read the last message of a prompt, which the choice continues."""
        start = next(token_id for token_id, mark in self._marks.items() if mark == "<|start|>")
        if start in prompt:
            for token_id in prompt[len(prompt) - 1 - prompt[::-1].index(start) :]:
                self.channel_of(token_id, tokenizer.token_bytes(token_id))
        return self

    def of_choice(self, parts: Parts | None, special_ids: Container[int]) -> HarmonyChannels:
        """Return a copy for a choice. With `parts` messages to functions are calls, without the text of special_ids."""
        channels = copy(self)
        channels._parts, channels._special_ids, channels._arguments = parts, special_ids, Detokenizer()
        return channels

    def channel_of(self, token_id: int, data: bytes) -> Channel | None:
        """Return the channel of the next token; None for a token of the frame or of a call."""
        match self._marks.get(token_id):
            case None:
                if self._header is not None:
                    self._header = (self._header + data)[:_HEADER_LIMIT]
                elif not self._is_call:
                    return self._channel
                elif self._parts is not None and token_id not in self._special_ids:
                    self._parts.add_arguments(self._arguments.decode(data))
            case "<|message|>":
                self._begin(self._header or b"")
            case "<|end|>":
                self.end()
                self._channel, self._header = "text", None
            case mark:
                self.end()
                self._function = None if mark == "<|start|>" else _function_of(self._header or b"")
                self._header = b""
        return None

    def end(self) -> None:
        """End a call, which may lack the end of a character."""
        if self._is_call and self._parts is not None:
            self._parts.add_arguments(self._arguments.decode(b"", True))
        self._is_call = False

    def _begin(self, header: bytes) -> None:
        """Begin the message that follows a header."""
        self.end()
        self._channel, self._header = "reasoning" if header.split()[:1] == [b"analysis"] else "text", None
        function = _function_of(header) or self._function
        if self._parts is not None and function is not None:
            self._parts.begin_call(function)
            self._is_call = True


def _function_of(header: bytes) -> str | None:
    found = _FUNCTION.search(header)
    return None if found is None else found[1].decode()
