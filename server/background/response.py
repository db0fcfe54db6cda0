"""Answers a client with a background completion: in one piece or as events.

The bytes are those of a plain completion, which `completions/answer.py` writes. `api/background.py` returns it.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptserve.server.background.job import BackgroundJob
from gptserve.server.background.store import BackgroundStore
from gptserve.server.completions.answer import AnswerSender
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionOutput
from gptserve.server.completions.service import Service
from gptserve.server.http.envelope import log_fields


class BackgroundResponse(Response):
    """Answers with a background completion: whole, or as its events after the `after`-th. The completion runs on."""

    def __init__(
        self,
        service: Service,
        store: BackgroundStore,
        job: BackgroundJob,
        plan: CompletionPlan,
        *,
        stream: bool,
        after: int = 0,
    ) -> None:
        super().__init__()
        self._service = service
        self._store = store
        self._job = job
        self._plan = plan
        self._stream = stream
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ServiceError only before anything is sent."""
        log_fields(scope)["completion_id"] = self._job.completion_id
        output = CompletionOutput(self._plan, self._service.tokenizer)
        reader = self._store.reader(self._job)
        answer = AnswerSender(self._service, self._plan, output, output.apply, reader, reader.close)
        try:
            if self._stream:
                await answer.send_events(scope, receive, send, is_resumable=True, after=self._after)
            else:
                await answer.send_whole(scope, receive, send)
        finally:
            reader.close()
