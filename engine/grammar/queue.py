"""Where requests wait while their grammars are compiled, so that no step does. Engine fills and empties it."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from gptserve.engine.grammar.compiler import CompilingThread, GrammarError
from gptserve.engine.grammar.matcher import Matcher
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.engine.scheduling.scheduler import Scheduler
from gptserve.weights.errors import WeightsError

logger = logging.getLogger(__name__)

_WAIT_S = 0.01
"""How long a step that would compute nothing waits for a grammar; commands wait as long."""


class GrammarQueue:
    """Requests with grammars and their matchers to come, in order of arrival."""

    def __init__(self, folder: Path) -> None:
        self._thread = CompilingThread(folder)
        self._waiting: dict[str, tuple[Request, Future[Matcher]]] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request is here."""
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Begin to compile the grammar of a request."""
        assert request.params.grammar is not None
        self._waiting[request.request_id] = request, self._thread.compile(request.params.grammar)

    def abort(self, request_id: str) -> None:
        """Forget a request; one that is not here is ignored."""
        _, future = self._waiting.pop(request_id, (None, None))
        if future is not None:
            future.cancel()

    def let_in(self, scheduler: Scheduler) -> list[TokenOutput]:
        """Queue the requests whose grammars are compiled; return the outputs of those whose grammars are none."""
        if self._waiting and not scheduler.has_work:
            wait([future for _, future in self._waiting.values()], _WAIT_S, FIRST_COMPLETED)
        outputs: list[TokenOutput] = []
        for request_id, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            compiled = _result(future)
            if isinstance(compiled, Matcher):
                scheduler.add(request).matcher = compiled
            else:
                error = f"the grammar cannot be compiled: {compiled}"
                outputs.append(TokenOutput(request_id, (), finish_reason=FinishReason.ERROR, error=error))
        return outputs


def _result(future: Future[Matcher]) -> Matcher | str:
    """Return the matcher, or why there is none."""
    try:
        return future.result()
    except (GrammarError, WeightsError) as fault:
        return str(fault)
    except BaseException as fault:  # a panic in Rust is no Exception
        logger.error("a grammar could not be compiled", exc_info=fault)
        return f"{type(fault).__name__}: {fault}"
