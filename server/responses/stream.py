"""Sends a stored response to one reader: whole, or as its events from any of them on.

The number of an event is its place in the stream of all events. That depends on the tokens alone, so a reader goes on
exactly wherever it comes back: while the response is computed, after its end, and after a restart of the server.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptserve.server.completions.answer import AnswerSender
from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.run import CompletionOutput
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import Json
from gptserve.server.completions.sse import KEEP_ALIVE
from gptserve.server.core.background_status import BackgroundStatus
from gptserve.server.core.error_responses import error_body, status_of
from gptserve.server.core.errors import ServiceError
from gptserve.server.http.envelope import log_fields
from gptserve.server.jobs.background import BackgroundJobs
from gptserve.server.jobs.job import BackgroundJob
from gptserve.server.jobs.position import ResumedOutput, single_tokens
from gptserve.server.jobs.recorder import RESUMABLE
from gptserve.server.jobs.records import OutputBatch
from gptserve.server.responses.plan import ResponsePlan, Status, end_status
from gptserve.server.text.output import Delta

NO_EVENT = -1
"""The number of the last event that a reader of all events has."""


class ResponseEncoder:
    """Renders the events of one stream but those that its reader has, up to number `after`.

    An error that ends the response is its last event. Any other, such as the server's shutdown, is not part of the
    response and has no number.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, plan: ResponsePlan, after: int = NO_EVENT) -> None:
        self.number = 0
        self._plan = plan
        self._after = after
        self._output = plan.new_output()
        self._encoder = PiecewiseEncoder(ensure_ascii=True)
        first: Status = "queued" if plan.asked.background else "in_progress"
        self.opening = self._render(
            [self._of_response("created", first), self._of_response("in_progress", "in_progress")]
        )

    def chunk(self, _index: int, delta: Delta, _usage: Mapping[str, object] | None = None) -> str:
        """Return the events of a delta."""
        return self._render(self._output.add(delta))

    @property
    def num_entries(self) -> int:
        """How many logprobs the end has."""
        return self._output.num_entries

    def end(self, usage: Mapping[str, object]) -> str:
        """Return the last events of a response that ended well."""
        status, output = end_status(self._output), self._output
        ends = output.end("completed" if status == "completed" else "incomplete")
        return self._render(ends) + self._render([self._of_response(status, status, output=output, usage=usage)])

    def error(self, error: ServiceError) -> str:
        """Return the event that ends a stream which failed."""
        if status_of(error) < 500 or error.code in RESUMABLE:
            return f"data: {self._encoder.encode_short(error_body(error))}\n\n"
        return self._render([self._of_response("failed", "failed", output=self._output, error=str(error))])

    def _of_response(self, name: str, status: Status, **fields: Any) -> Json:
        return {"type": f"response.{name}", "response": self._plan.response(status, **fields)}

    def _render(self, events: Iterable[Json]) -> str:
        rendered = []
        for event in events:
            if self.number > self._after:
                data = self._encoder.encode({"type": event["type"], "sequence_number": self.number, **event})
                rendered.append(f"event: {event['type']}\ndata: {data}\n\n")
            self.number += 1
        return "".join(rendered)


@dataclass(eq=False)
class StoredAnswer(Response):
    """Answers with a stored response: whole, or as the events after number `after`.

    If it `ends_with_client`, it is cancelled when the client hangs up.
    """

    service: Service
    jobs: BackgroundJobs
    job: BackgroundJob
    plan: ResponsePlan
    stream: bool
    after: int = NO_EVENT
    ends_with_client: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ServiceError only before anything is sent."""
        log_fields(scope)["completion_id"] = self.job.completion_id
        reader, output = self.jobs.reader(self.job), ResumedOutput(self.plan, None)

        async def source() -> AsyncIterator[OutputBatch]:
            async for outputs in reader:
                yield tuple(chain.from_iterable(map(single_tokens, outputs)))

        answer = AnswerSender(self.service, self.plan, output, output.add, source(), reader.close)
        try:
            if self.stream:
                await answer.send_events(scope, receive, send, ResponseEncoder(self.plan, self.after))
            else:
                await answer.send_whole(scope, receive, send)
        except ClientDisconnect:
            if self.ends_with_client:
                await self.jobs.cancel(self.job)
            raise


def render_response(plan: ResponsePlan, batches: Iterable[OutputBatch], status: Status, error: str | None) -> Json:
    """Return the response that these outputs make. Its status is that of its job; one that ended well may be cut."""
    of_tokens, output = CompletionOutput(plan), plan.new_output()
    for delta in _deltas(of_tokens, batches):
        list(output.add(delta))
    if status == "completed":
        status = end_status(output)
    usage = of_tokens.usage() if status in ("completed", "incomplete", "cancelled") else None
    return plan.response(status, output, usage, error)


def count_events(plan: ResponsePlan, batches: Iterable[OutputBatch], status: BackgroundStatus) -> int:
    """Return the number of events that these outputs and the status of their job make."""
    output, encoder = CompletionOutput(plan), ResponseEncoder(plan, after=sys.maxsize)
    for delta in _deltas(output, batches):
        encoder.chunk(0, delta)
    if status == "completed":
        encoder.end(output.usage())
    return encoder.number + (status == "failed")


def _deltas(output: CompletionOutput, batches: Iterable[OutputBatch]) -> Iterator[Delta]:
    """Yield the deltas of the only choice, token by token, as readers get them."""
    for made in chain.from_iterable(map(single_tokens, chain.from_iterable(batches))):
        added = output.add(made)
        if added is not None:
            yield added[1]
