"""AppOptions: the settings of an application and what was made of them. `serve.py` and tests make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gptserve.server.core.settings import ServerSettings
from gptserve.weights.chat.template import ChatTemplate

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gptserve.server.completions.grammar import GrammarChecker
    from gptserve.server.completions.plan import CompletionPlan
    from gptserve.server.completions.times import CompletionTimes


class Tracing(Protocol):
    """Makes spans of requests and completions."""

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return an application that makes a span of each request to `app`."""

    def add_completion(
        self, plan: CompletionPlan, usage: Mapping[str, object], times: CompletionTimes, reasons: Sequence[str]
    ) -> None:
        """Make the span of a completion that has ended, its choices for these reasons."""


@dataclass(frozen=True, slots=True)
class AppOptions:
    """The settings, what was made of them, and limits that are no settings. Chats need a chat_template.

    Requests may name the model by its aliases, too. sampling_defaults are the model's own values of sampling
    parameters, max_new_tokens is its own limit of an answer in a chat. max_choices limits the number of prompts times
    n; max_tokens_held and max_logprobs_held limit one request, all its choices together.
    """

    settings: ServerSettings
    model_name: str
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    chat_template: ChatTemplate | None = None
    grammar_checker: GrammarChecker | None = None  # without one the engine alone finds out
    tracing: Tracing | None = None
    tokenizer_info: Mapping[str, object] = field(default_factory=lambda: {"tokenizer_class": "unknown"})
    body_limit_s: float = 60.0  # the largest body at a quarter of a megabit a second
    max_choices: int = 128
    max_tokens_held: int = 2**17  # at 170 to 430 bytes each, 56 MB; one choice may have the whole context
    max_logprobs_held: int = 150_000  # at 240 bytes each with 20 alternatives, 1,250 without: at most 164 MB
