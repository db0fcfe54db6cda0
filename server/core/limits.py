"""What the owner of an API key may use at once and in a minute, so that no key takes the whole queue.

`Service` asks before it plans and before it submits, `ApiKeyGuard` before all else. `RequestEnvelope` sends what is
left as headers. Knows neither keys nor HTTP.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.process.client import TokenStream
from gptserve.server.core.errors import ServiceError


@dataclass(slots=True)
class _Use:
    """What one owner has at once, and what its bucket of tokens held when it was last looked at."""

    num_tokens: float
    filled_at: float
    streams: WeakSet[TokenStream] = field(default_factory=WeakSet)
    num_planned: int = 0
    num_answers: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_planned + sum(stream.num_live for stream in self.streams)


class KeyLimits:
    """The limits of each owner: requests that run or wait (a choice is one), tokens in a minute, and open answers.

    None is no limit. max_requests and max_answers return theirs, as keys come and go. An answer is any of HTTP, so that
    readers of one completion count, too.

    Tokens are a bucket that holds the tokens of a minute and fills evenly. Prompts and answers are taken from it as
    they come, below zero, too; nothing is admitted until it holds a token again.
    """

    def __init__(
        self,
        max_requests: Callable[[], int | None] = lambda: None,
        max_tokens_per_minute: int | None = None,
        max_answers: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens_per_minute
        self._max_answers = max_answers
        self._clock = clock
        self._uses = defaultdict[str, _Use](lambda: _Use(max_tokens_per_minute or 0, clock()))

    def check_possible(self, owner: str | None, n: int, num_prompts: int) -> None:
        """Raise InvalidRequestError if an owner can never have n choices of so many prompts."""
        limit = self.most_requests(owner)
        if limit is not None and n * num_prompts > limit:
            rule = f"n times the number of prompts may be at most {limit} with this key"
            raise InvalidRequestError(f"{rule}, got {n} times {num_prompts}", param="n")

    def most_requests(self, owner: str | None) -> int | None:
        """Return how many requests of an owner may run or wait; None is no limit."""
        return None if owner is None else self._max_requests()

    def check(self, owner: str | None, num_requests: int) -> None:
        """Raise ServiceError if these requests would be too many, or no token is left."""
        if owner is None:
            return
        use, limit = self._use(owner), self._max_requests()
        if limit is not None and use.num_requests + num_requests > limit:
            counts = f"{use.num_requests} active, got {num_requests} more"
            raise _exceeded(f"key {owner!r} may have at most {limit} requests running or queued: {counts}", 1)
        if self._max_tokens is not None and use.num_tokens < 1:
            wait_s = math.ceil((1 - use.num_tokens) * 60 / self._max_tokens)
            message = f"a key may use {self._max_tokens} tokens a minute: {owner!r} may again in {wait_s} s"
            raise _exceeded(message, wait_s)

    def note_planned(self, owner: str | None, num_requests: int) -> None:
        """Count requests that are being planned; no more, if the number is negative."""
        if owner is not None:
            self._use(owner).num_planned += num_requests

    @contextmanager
    def answering(self, owner: str) -> Iterator[None]:
        """Count an open answer. Raises ServiceError if the owner has too many."""
        use, limit = self._use(owner), self._max_answers()
        if limit is not None and use.num_answers >= limit:
            raise _exceeded(f"key {owner!r} may have at most {limit} open answers: {use.num_answers} are open", 1)
        use.num_answers += 1
        try:
            yield
        finally:
            use.num_answers -= 1

    def begin(self, owner: str | None, stream: TokenStream) -> None:
        """Count the requests of a stream until each of them ends."""
        if owner is not None:
            self._use(owner).streams.add(stream)

    def charge(self, owner: str | None, num_tokens: int) -> None:
        """Take tokens from what an owner has left."""
        if owner is not None:
            self._use(owner).num_tokens -= num_tokens

    def headers(self, owner: str | None) -> list[tuple[bytes, bytes]]:
        """Return what an owner has left, in the headers of OpenAI."""
        if owner is None:
            return []
        use, limit = self._use(owner), self._max_requests()
        left: dict[str, object] = {}
        if limit is not None:
            left |= {"limit-requests": limit, "remaining-requests": max(0, limit - use.num_requests)}
        if self._max_tokens is not None:
            reset_s = math.ceil((self._max_tokens - use.num_tokens) * 60 / self._max_tokens)
            left |= {"limit-tokens": self._max_tokens, "remaining-tokens": max(0, int(use.num_tokens))}
            left["reset-tokens"] = f"{reset_s}s"
        return [(f"x-ratelimit-{name}".encode(), str(value).encode()) for name, value in left.items()]

    def _use(self, owner: str) -> _Use:
        """Return what an owner uses, with its bucket filled up to now."""
        use, now = self._uses[owner], self._clock()
        if self._max_tokens is not None:
            use.num_tokens = min(self._max_tokens, use.num_tokens + (now - use.filled_at) * self._max_tokens / 60)
        use.filled_at = now
        return use


def _exceeded(message: str, retry_after_s: int) -> ServiceError:
    return ServiceError("rate_limit_exceeded", message, retry_after_s=retry_after_s)
