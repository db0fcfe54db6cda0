"""From token ids to text: whole UTF-8 only, stop strings, logprobs with offsets.

Everything here gives the same result however the bytes are split into tokens and the tokens into steps. Knows nothing
of HTTP; `completion.py` has one ChoiceOutput per choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from engine.request import FinishReason, TokenLogprobs, TokenOutput

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; vLLM's value


class TokenBytes(Protocol):
    """The part of a tokenizer that decoding needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""


class Detokenizer:
    """Decodes UTF-8 that arrives in arbitrary pieces.

    All the text together equals `bytes.decode(errors="replace")`: U+FFFD stands only for bytes that can never become a
    character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that are complete now."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what the bytes of an unfinished character stand for, now that nothing follows."""
        return self._decoder.decode(b"", True)


class StopPattern(NamedTuple):
    """A stop string with its borders: borders[i] is the length of the longest proper border of text[: i + 1]."""

    text: str
    borders: tuple[int, ...]


def compile_stop(text: str) -> StopPattern:
    """Prepare a stop string for matching character by character (Knuth, Morris and Pratt 1977)."""
    borders = [0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length - 1]
        borders.append(length + (text[length] == char))
    return StopPattern(text, tuple(borders))


class StopStrings:
    """Lets text through up to the first stop string, holding back what could be the start of one.

    The match that ends first wins, the longest of those that end together. Invariant: what is held back is the longest
    suffix of all the text so far that starts a stop string.
    """

    def __init__(self, patterns: Sequence[StopPattern]) -> None:
        self.matched: str | None = None
        self._patterns = patterns
        self._progress = [0] * len(patterns)
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that is certain to come before any stop string; nothing may be fed after a match."""
        assert self.matched is None
        if not self._patterns:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            matched = self._advance(char)
            if matched:
                self.matched, self._held = matched, ""
                return buffer[: end - len(matched)]
        certain = len(buffer) - max(self._progress)
        self._held = buffer[certain:]
        return buffer[:certain]

    def flush(self) -> str:
        """Return what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        """Take one character; return the longest stop string that it completes, or nothing."""
        matched = ""
        for i, (stop, borders) in enumerate(self._patterns):
            length = self._progress[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            self._progress[i] = length
            if length == len(stop) > len(matched):
                matched = stop
        return matched


@dataclass(slots=True)
class LogprobLists:
    """OpenAI's parallel lists, one entry per token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return schemas.Logprobs, the lists not copied."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Delta:
    """What an engine output added to a choice. An empty one need not be sent."""

    text: str
    logprobs: LogprobLists | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the client would learn nothing from it."""
        return not self.text and self.logprobs is None and self.finish_reason is None

    def to_json(self, index: int) -> dict[str, object]:
        """Return schemas.Choice."""
        return {
            "index": index,
            "text": self.text,
            "logprobs": None if self.logprobs is None else self.logprobs.to_json(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Return all the deltas of a choice, at least one, as one."""
    text, last = "".join(delta.text for delta in deltas), deltas[-1]
    if last.logprobs is None:
        return replace(last, text=text)
    joined = LogprobLists()
    for name in LogprobLists.__slots__:
        getattr(joined, name).extend(entry for delta in deltas for entry in getattr(delta.logprobs, name))
    return replace(last, text=text, logprobs=joined)


class ChoiceOutput:
    """The text of one choice while its tokens arrive.

    `echo` is the prompt to return first. Stop strings are looked for in generated text only. A token that stops (the
    end of text, one of stop_token_ids) counts, and has a logprobs entry, but no text.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: Sequence[StopPattern] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: bool = False,
        echo: Sequence[int] = (),
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = Detokenizer()
        self._stops = StopStrings(stop)
        self._stop_token_ids = stop_token_ids
        self._with_logprobs = logprobs
        self._echo = echo
        self._offset = 0

    def add(self, output: TokenOutput) -> Delta:
        """Take the next output of this choice, which has not finished."""
        assert self.finish_reason is None
        logprobs = LogprobLists() if self._with_logprobs else None
        text = self._echo_prompt(output, logprobs) if self._echo else ""
        for i, token_id in enumerate(output.token_ids):
            data = self._token_bytes(token_id)
            if logprobs is not None:
                self._append(logprobs, data, output.logprobs[i])
            self.num_tokens += 1
            if output.stop_token_id is not None and i == len(output.token_ids) - 1:
                break
            text += self._feed(self._detokenizer.feed(data))
            if self._stops.matched is not None:
                break
        return self._end(text, logprobs, output)

    def _end(self, text: str, logprobs: LogprobLists | None, output: TokenOutput) -> Delta:
        """Return the delta, complete with the reason if this was the last."""
        stop_reason: str | int | None = None
        if output.finish_reason is not None and self._stops.matched is None:
            text += self._feed(self._detokenizer.finish())
            if output.finish_reason is FinishReason.LENGTH:
                self.finish_reason = "length"
            else:
                self.finish_reason = "stop"
                stop_reason = output.stop_token_id if output.stop_token_id in self._stop_token_ids else None
        if self._stops.matched is not None:
            self.finish_reason, stop_reason = "stop", self._stops.matched
        elif self.finish_reason is not None:
            text += self._stops.flush()
        return Delta(text, logprobs, self.finish_reason, stop_reason)

    def _echo_prompt(self, output: TokenOutput, logprobs: LogprobLists | None) -> str:
        """Return the prompt's text, its last unfinished character kept for what follows."""
        entries = output.prompt_logprobs or (None,) * len(self._echo)
        text = ""
        for token_id, entry in zip(self._echo, entries, strict=True):
            data = self._token_bytes(token_id)
            if logprobs is not None:
                self._append(logprobs, data, entry)
            piece = self._detokenizer.feed(data)
            self._offset += len(piece)
            text += piece
        self._echo = ()
        return text

    def _feed(self, text: str) -> str:
        self._offset += len(text)
        return self._stops.feed(text)

    def _append(self, lists: LogprobLists, data: bytes, entry: TokenLogprobs | None) -> None:
        lists.tokens.append(token_name(data))
        lists.text_offset.append(self._offset)
        if entry is None:
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            return
        logprob = max(entry.logprob, MIN_LOGPROB)
        top = {token_name(self._token_bytes(i)): max(value, MIN_LOGPROB) for i, value in entry.top}
        top.setdefault(lists.tokens[-1], logprob)
        lists.token_logprobs.append(logprob)
        lists.top_logprobs.append(top)


def token_name(data: bytes) -> str:
    r"""Return a token's text, or OpenAI's `bytes:\xe2\x9c` form where it is not whole UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")
