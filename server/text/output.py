"""From token ids to text: whole UTF-8 only, stop strings, logprobs with offsets, reasoning apart from text.

The result does not depend on how the bytes are split into tokens, nor the tokens into steps. Knows no HTTP; `run.py`
has one ChoiceOutput per choice.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

from gptserve.engine.request import FinishReason, TokenLogprobs, TokenOutput
from gptserve.server.text.calls import CallDelta, join_calls
from gptserve.server.text.stop import NO_STOP, StopAutomaton, StopStrings

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have; vLLM's value


Channel = Literal["text", "reasoning"]
EndReason = Literal["stop", "length", "tool_calls"]
TIMEOUT = "timeout"
"""The stop_reason of a choice whose time ran out. Its finish_reason is "length": clients know no other."""

Detokenizer = partial(codecs.getincrementaldecoder("utf-8"), "replace")
"""Decodes UTF-8 that arrives in arbitrary pieces.

All the text together equals `bytes.decode(errors="replace")`: U+FFFD replaces only bytes that can never become a
character. `decode(b"", True)` ends it, with the replacement for the bytes of an unfinished character.
"""


class TokenBytes(Protocol):
    """The part of a tokenizer that decoding needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""


class TokenScore(NamedTuple):
    """A token with its logprob and the likeliest tokens at its position; the first token of a prompt has no logprob.

    `offset` is the number of characters of the choice's text before it.
    """

    data: bytes
    offset: int
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]


class RankedToken(NamedTuple):
    """A token of a prompt, or a likely one at its position. The likeliest has rank 1; equals share a rank."""

    token_id: int
    data: bytes
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The tokens of a prompt with the `num_top` likeliest at each position; they are ranked when they are read."""

    entries: Sequence[TokenLogprobs | None]
    num_top: int
    token_bytes: Callable[[int], bytes]

    def ranked(self) -> Iterator[list[RankedToken] | None]:
        """Yield for each position the token itself, then the likeliest others; None for the first position."""
        for entry in self.entries:
            yield None if entry is None else self._rank(entry)

    def _rank(self, entry: TokenLogprobs) -> list[RankedToken]:
        top = [(token_id, logprob) for token_id, logprob in entry.top[: self.num_top] if token_id != entry.token_id]
        descending = [-logprob for _, logprob in entry.top]
        ranks = [entry.rank, *(bisect_left(descending, -logprob) + 1 for _, logprob in top)]
        listed = zip([(entry.token_id, entry.logprob), *top], ranks, strict=True)
        return [RankedToken(i, self.token_bytes(i), max(logprob, MIN_LOGPROB), rank) for (i, logprob), rank in listed]


@dataclass(slots=True)
class Delta:
    """The addition of one engine output to a choice. An empty one need not be sent.

    Nobody changes one. It is not frozen, as each token makes two, and frozen ones take five times as long to make.
    """

    text: str
    logprobs: list[TokenScore] | None = None
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    prompt_logprobs: PromptScores | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    tool_calls: tuple[CallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        scored = self.logprobs is not None or self.prompt_logprobs is not None
        return (
            not (self.text or self.reasoning or self.tool_calls or scored or self.token_ids)
            and self.finish_reason is None
        )

    @property
    def is_text_alone(self) -> bool:
        """Whether it adds nothing but text."""
        return self == Delta(self.text)

    @property
    def num_entries(self) -> int:
        """The number of entries of its lists: of logprobs and of token ids."""
        num_scored = 0 if self.prompt_logprobs is None else len(self.prompt_logprobs.entries)
        return num_scored + sum(
            len(entries or ()) for entries in (self.logprobs, self.token_ids, self.prompt_token_ids)
        )


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join the deltas of a choice, at least one."""
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=join_calls(call for delta in deltas for call in delta.tool_calls),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), None),
        logprobs=None if last.logprobs is None else [score for delta in deltas for score in delta.logprobs or ()],
        token_ids=None if last.token_ids is None else tuple(i for delta in deltas for i in delta.token_ids or ()),
    )


class ChoiceOutput:
    """The text of one choice while its tokens arrive.

    `echo` is the prompt, to return together with the first token. generates=False (max_tokens 0) returns only the
    prompt. logprobs and prompt_logprobs are the number of likeliest tokens to report with each token, None for no
    report. Tokens in `skip` have no text. Stop strings are searched in generated text only. A token that stops (end of
    text, stop_token_ids) counts and has a logprobs entry, but no text. `channel_of` assigns each token to the text, to
    the reasoning, or to neither; without it everything is text. No stop string ends before the token after the first
    min_tokens. With includes_stop the text has the stop string, and that of the token that stops. `returned_prompt` is
    the prompt if token ids are to be returned. With names_ids the logprobs name a token by its id. num_steps is the
    number of tokens so far, and one more for an end that came without a token.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: StopAutomaton = NO_STOP,
        stop_token_ids: Sequence[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        echo: Sequence[int] = (),
        generates: bool = True,
        skip: Container[int] = (),
        channel_of: Callable[[int, bytes], Channel | None] | None = None,
        min_tokens: int = 0,
        includes_stop: bool = False,
        returned_prompt: tuple[int, ...] | None = None,
        names_ids: bool = False,
    ) -> None:
        self.num_tokens = 0
        self.num_steps = 0
        self.finish_reason: EndReason | None = None
        self.is_timed_out = False
        self._token_bytes, self._skip = tokenizer.token_bytes, skip
        self._name_bytes = _id_name if names_ids else tokenizer.token_bytes
        self._detokenizer = Detokenizer()
        self._stops = StopStrings(stop, passes_match=includes_stop)
        self._stop_token_ids = stop_token_ids
        self._min_tokens, self._includes_stop = min_tokens, includes_stop
        self._returned_prompt, self._returns_ids = returned_prompt, returned_prompt is not None
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self._echo, self._generates = deque(echo), generates
        self._echoed_text: list[str] = []
        self._echoed_scores: list[TokenScore] = []
        self._prompt_entries: list[TokenLogprobs | None] = []
        self._offset = 0
        self._channel_of = channel_of
        self._channel: Channel | None = "text"
        self._reasoning = ""

    def add(self, output: TokenOutput) -> Delta:
        """Add the next output; the choice must not have finished."""
        assert self.finish_reason is None
        if output.prompt_logprobs is not None:
            if self._echo:
                self._echo_prompt(output.prompt_logprobs)
            if self._prompt_logprobs is not None:
                self._prompt_entries += output.prompt_logprobs
        if not output.token_ids and output.finish_reason is None:
            return Delta("")
        if not self._generates and output.finish_reason is not FinishReason.TIMEOUT:
            output = replace(output, token_ids=(), finish_reason=FinishReason.LENGTH, stop_token_id=None)
        self._echo_prompt((None,) * len(self._echo))
        logprobs, self._echoed_scores = (None if self._logprobs is None else self._echoed_scores), []
        text, self._echoed_text = "".join(self._echoed_text), []
        num_before = self.num_tokens
        for i, token_id in enumerate(output.token_ids):
            data = self._token_bytes(token_id)
            if logprobs is not None:
                logprobs.append(self._score(token_id, output.logprobs[i]))
            self.num_tokens += 1
            is_stop_token = output.stop_token_id is not None and i == len(output.token_ids) - 1
            if is_stop_token and not self._includes_stop:
                break
            if self._channel_of is not None:
                text += self._enter(self._channel_of(token_id, data))
            if token_id not in self._skip:
                text += self._feed(self._detokenizer.decode(data))
            if self._stops.matched is not None:
                break
        num_added = self.num_tokens - num_before
        delta = self._end(text, logprobs, output.token_ids[:num_added] if self._returns_ids else None, output)
        self.num_steps = self.num_tokens + (self.finish_reason is not None and num_added == 0)
        return delta

    def _end(
        self, text: str, logprobs: list[TokenScore] | None, token_ids: tuple[int, ...] | None, output: TokenOutput
    ) -> Delta:
        """Return the delta, with the finish reason if the output is the last."""
        stop_reason: str | int | None = None
        if output.finish_reason is not None and self._stops.matched is None:
            text += self._feed(self._detokenizer.decode(b"", True))
            self.finish_reason = "stop" if output.finish_reason is FinishReason.STOP else "length"
            if output.finish_reason is FinishReason.TIMEOUT:
                stop_reason = TIMEOUT
            elif output.stop_token_id in self._stop_token_ids:
                stop_reason = output.stop_token_id
        if self._stops.matched is not None:
            self.finish_reason, stop_reason = "stop", self._stops.matched
        elif self.finish_reason is not None:
            text += self._stops.flush()
        self.is_timed_out = (self.finish_reason, stop_reason) == ("length", TIMEOUT)
        reasoning, self._reasoning = self._reasoning, ""
        entries, self._prompt_entries = self._prompt_entries, []
        scores = PromptScores(entries, self._prompt_logprobs or 0, self._token_bytes) if entries else None
        prompt, self._returned_prompt = self._returned_prompt, None
        return Delta(text, logprobs, self.finish_reason, stop_reason, reasoning, scores, token_ids, prompt)

    def _echo_prompt(self, entries: Sequence[TokenLogprobs | None]) -> None:
        """Echo the next tokens of the prompt, one for each entry; hold back an unfinished character."""
        for entry in entries:
            token_id = self._echo.popleft()
            data = self._token_bytes(token_id)
            if self._logprobs is not None:
                self._echoed_scores.append(self._score(token_id, entry))
            piece = self._detokenizer.decode(b"" if token_id in self._skip else data)
            self._offset += len(piece)
            self._echoed_text.append(piece)

    def _enter(self, channel: Channel | None) -> str:
        """Switch to a channel; return the replacement for an unfinished character, as none spans two channels."""
        text = self._feed(self._detokenizer.decode(b"", True)) if channel != self._channel else ""
        self._channel = channel
        return text

    def _feed(self, text: str) -> str:
        """Add characters to the current channel; return the text to send now."""
        if self._channel == "reasoning":
            self._reasoning += text
        if self._channel != "text":
            return ""
        self._offset += len(text)
        return self._stops.feed(text, may_match=self.num_tokens > self._min_tokens)

    def _score(self, token_id: int, entry: TokenLogprobs | None) -> TokenScore:
        data = self._name_bytes(token_id)
        if entry is None:
            return TokenScore(data, self._offset, None, ())
        best = entry.top[: self._logprobs]
        top = tuple((self._name_bytes(other), max(value, MIN_LOGPROB)) for other, value in best)
        return TokenScore(data, self._offset, max(entry.logprob, MIN_LOGPROB), top)


def _id_name(token_id: int) -> bytes:
    """Return vLLM's name of a token whose text does not matter."""
    return b"token_id:%d" % token_id


def token_name(data: bytes) -> str:
    r"""Return a token's text, or OpenAI's `bytes:\xe2\x9c` form where it is not whole UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")
