"""Answers a client with a background completion: in one piece or as events.

The bytes are those of a plain completion, which `completions/answer.py` writes. `api/background.py` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptserve.server.background.job import Reader
from gptserve.server.completions.answer import AnswerSender
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionOutput
from gptserve.server.completions.service import Service
from gptserve.server.http.envelope import log_fields


@dataclass(eq=False)
class BackgroundResponse(Response):
    """Answers with what `reader` reads: whole, or as the events after the `after`-th. The completion runs on.

    `is_over` says that it has ended well: if there are no more events, the answer is 204.
    """

    service: Service
    plan: CompletionPlan
    reader: Reader
    stream: bool
    after: int
    is_over: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ServiceError only before anything is sent."""
        log_fields(scope)["completion_id"] = self.plan.identity.completion_id
        output = CompletionOutput(self.plan, self.service.tokenizer)
        answer = AnswerSender(self.service, self.plan, output, output.add, aiter(self.reader), self.reader.close)
        if self.stream:
            await answer.send_events(scope, receive, send, is_resumable=True, after=self.after, is_over=self.is_over)
        else:
            await answer.send_whole(scope, receive, send)
