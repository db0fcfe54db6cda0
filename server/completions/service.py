"""What every route works with: the engine, the tokenizer, the options, the metrics. Made by `create_app`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from gptserve.engine.errors import EngineError
from gptserve.engine.process.client import EngineClient, TokenStream
from gptserve.engine.request import Request
from gptserve.server.api.body import IncomingBodies
from gptserve.server.errors import ApiError, show, shutting_down, to_api_error, unavailable
from gptserve.server.operations.lifecycle import Lifecycle
from gptserve.server.operations.metrics import Metrics
from gptserve.weights.chat.template import ChatTemplate

Result = TypeVar("Result")


class Tokenizer(Protocol):
    """What the server asks of weights.tokenizer.Tokenizer."""

    @property
    def max_token_bytes(self) -> int:
        """The most bytes a token stands for."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are no text."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of `text` with those that a prompt begins or ends with."""

    def encode_with_special(self, text: str) -> list[int]:
        """Return the token ids of text in which the text of a special token means that token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""


@dataclass(frozen=True, slots=True)
class AppOptions:
    """How the API is to behave. Without api_keys and api_key_file anyone may ask; max_choices bounds prompts times n.

    Without a chat_template there is no chat. At most max_results completions are kept, each for result_ttl_s after its
    end. max_tokens_held and max_logprobs_held bound what the server holds of one request, all its choices together.
    """

    model_name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    protect_operations: bool = False
    priority_scheduling: bool = False
    max_body_bytes: int = 2 * 2**20
    body_limit_s: float = 60.0  # the largest body at a quarter of a megabit a second
    keep_alive_s: float = 15.0
    max_choices: int = 128
    max_tokens_held: int = 2**17  # at 170 to 430 bytes each, 56 MB; one choice may have the whole context
    max_logprobs_held: int = 150_000  # at 240 bytes each with 20 alternatives, 1,250 without: at most 164 MB
    result_ttl_s: float = 3600.0
    max_results: int = 1_000
    chat_template: ChatTemplate | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """Everything a route needs, in one hand."""

    engine: EngineClient
    tokenizer: Tokenizer
    options: AppOptions
    lifecycle: Lifecycle
    metrics: Metrics
    bodies: IncomingBodies = field(default_factory=IncomingBodies)
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def in_thread(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Return the result of a long computation in Python, made in a thread.

        There is one at a time: each that computes takes turns with the event loop at the interpreter's lock.
        """
        async with self._computing:
            return await asyncio.to_thread(call, *arguments)

    def admit(self) -> None:
        """Raise ApiError unless a completion may start now."""
        with self.counting_rejections():
            self._check_open()

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queue the requests. Raises ApiError or EngineError."""
        with self.counting_rejections():
            self._check_open()
            return self.engine.submit(requests)

    @property
    def needs_key(self) -> bool:
        """Whether completions are for bearers of a key."""
        return bool(self.options.api_keys) or self.options.api_key_file is not None

    def check_ready(self) -> None:
        """Raise ApiError unless a completion that starts now is computed now: while an engine restarts, it waits."""
        self._check_open()
        if not self.engine.is_ready:
            raise unavailable("the engine died and is being started again", code="engine_restarting")

    def check_alive(self) -> None:
        """Raise ApiError unless the engine can answer."""
        if not self.engine.is_alive:
            raise unavailable("no engine is running: it is loading or has died", code="engine_unavailable")

    def check_model(self, name: str) -> None:
        """Raise ApiError unless `name` is the model served."""
        served = self.options.model_name
        if name != served:
            message = f"model {show(name)} does not exist; this server has {served!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _check_open(self) -> None:
        if self.lifecycle.is_draining:  # first: once it has drained, the engine is closed
            raise shutting_down()
        self.check_alive()

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count what is refused within it."""
        try:
            yield
        except (ApiError, EngineError) as error:
            api_error = to_api_error(error)
            if api_error.status in (429, 503):
                self.metrics.count_rejection(api_error.code)
            raise
