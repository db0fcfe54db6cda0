"""Answers a client with a completion: in one piece or as events.

`CompletionResponse` computes a completion for its client alone; `api/completions.py` returns it. `AnswerSender` writes
an answer, the same bytes wherever the outputs come from; background work uses it, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptserve.engine.request import TokenOutput
from gptserve.server.completions import sse
from gptserve.server.completions.encoding import PIECE_ENTRIES, StreamEncoder, json_response
from gptserve.server.completions.lengths import capped_max_tokens
from gptserve.server.completions.plan import CompletionPlan
from gptserve.server.completions.run import CompletionOutput, CompletionRun, begin_output, expiring
from gptserve.server.completions.service import Service
from gptserve.server.http.envelope import log_fields, report
from gptserve.server.text.output import Delta

OutputStream = AsyncIterator[tuple[TokenOutput, ...]]
Result = TypeVar("Result")


class CompletionResponse(Response):
    """Submits a plan and answers with the completion. Stops computing when the client hangs up."""

    def __init__(
        self, service: Service, plan: CompletionPlan, started_at: float, encoder: StreamEncoder | None = None
    ) -> None:
        super().__init__()
        self._service = service = service.using(plan.model)
        self._plan = plan
        self._encoder = encoder
        self._started_at = started_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ServiceError or EngineError only before anything is sent."""
        with self._service.lifecycle.active():
            begun = self._plan, self._service, self._started_at
            run = await begin_output(self._service, self._plan, CompletionRun, *begun)
            stream = self._service.submit(run.output.unfinished(), self._plan.identity.owner)
            add = partial(run.add, stream=stream)
            answer = AnswerSender(self._service, self._plan, run.output, add, stream, stream.abort)
            try:
                with expiring(stream, self._plan.remaining_s(time.perf_counter() - self._started_at)):
                    if self._plan.body.stream:
                        encoder = self._encoder or encoder_of(self._plan)
                        run.is_failed = not await answer.send_events(scope, receive, send, encoder)
                    else:
                        await answer.send_whole(scope, receive, send)
            except Exception as error:
                run.is_failed = not isinstance(error, ClientDisconnect)
                raise
            finally:
                stream.abort()
                log_fields(scope).update(run.close())
                self._service.limits.charge(self._plan.identity.owner, run.output.num_tokens)


def encoder_of(
    plan: CompletionPlan, event_id: Callable[[], str] | None = None, *, is_open: bool = False
) -> sse.EventEncoder:
    """Return the encoder for the events of a plan's stream; `is_open` if its client has some of them."""
    head, num_choices = plan.head(of_chunk=True), len(plan.requests)
    is_open = is_open or plan.num_given_tokens > 0
    return sse.EventEncoder(
        head, plan.shape, num_choices, include_usage=plan.includes_usage, event_id=event_id, is_open=is_open
    )


@dataclass(frozen=True, slots=True)
class AnswerSender:
    """Sends the answer to a plan. `add` adds an output of `source` to `output`, as `CompletionOutput.add` does.

    Calls `on_gone` when the client hangs up.
    """

    service: Service
    plan: CompletionPlan
    output: CompletionOutput
    add: Callable[[TokenOutput], tuple[int, Delta] | None]
    source: OutputStream
    on_gone: Callable[[], None]

    async def send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the completion in one piece."""
        self._tell_limit(scope)
        collected = self.output.begun()
        async with sse.Connection(receive, send, self.on_gone) as connection:
            async for outputs in self.source:
                async for index, delta in self._added(outputs):
                    collected[index].append(delta)
        if connection.is_gone:
            raise ClientDisconnect
        num_entries = sum(delta.num_entries for deltas in collected for delta in deltas)
        usage = self.output.usage()
        response = await self._computed(num_entries, lambda: json_response(self.plan.whole(collected, usage)))
        await response(scope, receive, send)

    def _tell_limit(self, scope: Scope) -> None:
        log_fields(scope)["max_tokens"] = capped_max_tokens(self.plan.body, self.plan.requests)

    async def _added(self, outputs: Iterable[TokenOutput]) -> AsyncIterator[tuple[int, Delta]]:
        """Yield index and delta of each output; let the event loop turn after an output with scores of the prompt."""
        for output in outputs:
            if (added := self.add(output)) is not None:
                yield added
            if output.prompt_logprobs is not None:
                await asyncio.sleep(0)

    async def _computed(self, num_entries: int, render: Callable[..., Result], *arguments: object) -> Result:
        """Call `render`, in a thread when num_entries says that it takes long; return its result."""
        if num_entries > PIECE_ENTRIES:
            return await self.service.in_thread(render, *arguments)
        return render(*arguments)

    async def send_events(self, scope: Scope, receive: Receive, send: Send, encoder: StreamEncoder) -> bool:
        """Send the completion as events; an error becomes the last event. Return whether there was no error."""
        is_well = True
        self._tell_limit(scope)
        every_s, ping = self.service.options.settings.sse_keep_alive_interval_s, encoder.keep_alive
        async with sse.Connection(receive, send, self.on_gone, keep_alive_s=every_s, keep_alive=ping) as connection:
            await connection.begin(encoder.opening)
            try:
                async for outputs in self.source:
                    await self._write_events(outputs, encoder, connection)
                end = await self._computed(encoder.num_entries, encoder.end, self.output.usage())
            except Exception as error:
                is_well = False
                end = encoder.error(report(error, scope))
        if connection.is_gone:
            raise ClientDisconnect
        await connection.write(end.encode("ascii"), is_last=True)
        return is_well

    async def _write_events(
        self, outputs: Iterable[TokenOutput], encoder: StreamEncoder, connection: sse.Connection
    ) -> None:
        """Write the events of these outputs together; if one of them fails, those before it."""
        counts_usage = self.plan.counts_usage
        events: list[str] = []
        try:
            async for index, delta in self._added(outputs):
                if not delta.is_empty:
                    usage = self.output.usage() if counts_usage else None
                    events.append(await self._computed(delta.num_entries, encoder.chunk, index, delta, usage))
        finally:
            if events:
                await connection.write("".join(events).encode("ascii"))
