"""Where requests wait while their grammars are compiled, so that no step does. Engine fills and empties it."""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from gptserve.engine.grammar.compiler import GrammarError
from gptserve.engine.grammar.compiling import CompilingThread
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.weights.errors import WeightsError

logger = logging.getLogger(__name__)

_WAIT_S = 0.01
"""How long a step that would compute nothing waits for a grammar; commands wait as long."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for the matcher to come."""

    request: Request
    future: Future[Matcher]
    queued_at: float


class GrammarQueue:
    """Requests with grammars, in order of arrival. Those that wait longer than max_queue_time_s are ended."""

    def __init__(self, folder: Path, max_queue_time_s: float | None = None) -> None:
        self._thread = CompilingThread(folder)
        self._max_queue_time_s = max_queue_time_s
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        """How many requests are here."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Begin to compile the grammar of a request."""
        assert request.params.grammar is not None
        future = self._thread.compile(request.params.grammar)
        self._waiting[request.request_id] = _Waiting(request, future, time.monotonic())

    def abort(self, request_id: str) -> None:
        """Forget a request; one that is not here is ignored."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.future.cancel()

    def let_in(self, scheduler: Scheduler) -> list[TokenOutput]:
        """Queue the requests whose grammars are compiled; return the outputs of those that end without.

        Raises EngineError if too many grammars never compile.
        """
        self._thread.replace_if_stuck()
        if self._waiting and not scheduler.has_work:
            wait([waiting.future for waiting in self._waiting.values()], _WAIT_S, FIRST_COMPLETED)
        outputs: list[TokenOutput] = []
        for request_id, waiting in list(self._waiting.items()):
            if waiting.future.done():
                del self._waiting[request_id]
                compiled = _result(waiting.future)
                if isinstance(compiled, Matcher):
                    sequence = scheduler.add(waiting.request)
                    sequence.matcher, sequence.queued_at = compiled, waiting.queued_at
                else:
                    error = f"the grammar cannot be compiled: {compiled}"
                    outputs.append(TokenOutput(request_id, (), finish_reason=FinishReason.ERROR, error=error))
            elif self._is_overdue(waiting):
                self.abort(request_id)
                error = f"the request was not admitted within {self._max_queue_time_s} s"
                outputs.append(TokenOutput(request_id, (), finish_reason=FinishReason.QUEUE_TIMEOUT, error=error))
        return outputs

    def _is_overdue(self, waiting: _Waiting) -> bool:
        """Whether a request has waited too long. A filler never has, nor has one that may have run before."""
        if self._max_queue_time_s is None or waiting.request.is_filler or waiting.request.may_have_run:
            return False
        return time.monotonic() - waiting.queued_at > self._max_queue_time_s


def _result(future: Future[Matcher]) -> Matcher | str:
    """Return the matcher, or why there is none."""
    try:
        return future.result()
    except (GrammarError, WeightsError) as fault:
        return str(fault)
    except BaseException as fault:  # a panic in Rust is no Exception
        logger.error("a grammar could not be compiled", exc_info=fault)
        return f"{type(fault).__name__}: {fault}"
