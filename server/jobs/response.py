"""Answers a client with a background completion: in one piece or as events.

The bytes are those of a plain completion, which `completions/answer.py` writes, with an id for each event.
`api/background.py` returns it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import chain

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptserve.server.completions.answer import AnswerSender, encoder_of
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import begin_output
from gptserve.server.completions.service import Service
from gptserve.server.http.envelope import log_fields
from gptserve.server.jobs.job import Reader
from gptserve.server.jobs.position import LastEvent, Position, ResumedOutput, single_tokens
from gptserve.server.jobs.records import OutputBatch


@dataclass(eq=False)
class BackgroundResponse(Response):
    """Answers with what `reader` reads: whole, or as events, one for each token. The completion runs on.

    The client has the events up to `after`. `whole` is the position at the end of a completion that has ended well: a
    client that has all of it gets status 204, as an EventSource would come back for ever otherwise.
    """

    service: Service
    plan: CompletionPlan
    reader: Reader
    stream: bool
    after: LastEvent | None
    whole: Position | None

    def __post_init__(self) -> None:
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ServiceError only before anything is sent."""
        log_fields(scope)["completion_id"] = self.plan.identity.completion_id
        begun = self.plan, self.after if self.stream else None
        output = await begin_output(self.service, self.plan, ResumedOutput, *begun)
        source = self._outputs(output)
        answer = AnswerSender(self.service, self.plan, output, output.add, source, self.reader.close)
        if not self.stream:
            await answer.send_whole(scope, receive, send)
            return
        is_open = self.after is not None and any(self.after.position.counts)
        encoder = encoder_of(self.plan, lambda: output.event_id, is_open=is_open)
        if self.after is not None and self.after.position.has_usage:
            encoder.include_usage = False
        if self._has_all():
            await Response(status_code=204)(scope, receive, send)
        else:
            await answer.send_events(scope, receive, send, encoder)

    def _has_all(self) -> bool:
        if self.after is None or self.whole is None:
            return False
        return self.after.position == replace(self.whole, has_usage=self.plan.includes_usage)

    async def _outputs(self, output: ResumedOutput) -> AsyncIterator[OutputBatch]:
        async for outputs in self.reader:
            yield tuple(chain.from_iterable(map(single_tokens, outputs)))
        if output.is_complete:
            output.check_end()
