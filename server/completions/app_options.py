"""AppOptions: the settings of an application and what was made of them. `parts.py` and `gptserve batch` make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gptserve.server.core.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

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
    """The settings, what was made of them, and limits that are no settings.

    max_choices limits the number of prompts times n; max_tokens_held and max_logprobs_held limit one request, all its
    choices together. A server that is_one_of_several gets any of their requests, and so those for what another keeps.
    """

    settings: ServerSettings
    tracing: Tracing | None = None
    is_one_of_several: bool = False
    body_limit_s: float = 60.0  # the largest body at a quarter of a megabit a second
    max_choices: int = 128
    max_tokens_held: int = 2**17  # at 170 to 430 bytes each, 56 MB; one choice may have the whole context
    max_logprobs_held: int = 150_000  # at 240 bytes each with 20 alternatives, 1,250 without: at most 164 MB
