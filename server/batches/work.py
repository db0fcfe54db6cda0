"""Computes the lines of a batch: each is a completion behind all others (Request.is_filler), answered in one piece.

`ENDPOINTS` is the one table of what a line may ask for. A line's ids, its time and, without a seed of its own, its seed
are drawn from the batch and its number: whoever computes it again gets the same. Knows no HTTP and no files.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gptserve.engine.errors import EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.server.batches.lines import BatchLine, RawLine, line_digest, line_of, line_seed
from gptserve.server.completions.admission import planned
from gptserve.server.completions.chat import plan_chat
from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.plan import CompletionPlan, plan_completion
from gptserve.server.completions.planning import Place
from gptserve.server.completions.run import CompletionRun, expiring
from gptserve.server.completions.service import Service
from gptserve.server.core.error_responses import error_body, status_of, to_service_error
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest, GenerationRequest
from gptserve.server.schemas.fields import take_fields
from gptserve.server.schemas.seed import DRAW
from gptserve.server.text.output import Delta

_ENCODER = PiecewiseEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the lines of a batch have in common. `created` is in seconds since the epoch."""

    batch_id: str
    created: int
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to read the body of a line, and to plan it."""

    schema: type[GenerationRequest]
    plan: Callable[[GenerationRequest, Service, str | None], Awaitable[CompletionPlan]]


async def _plan_completion(body: GenerationRequest, service: Service, owner: str | None) -> CompletionPlan:
    assert isinstance(body, CompletionRequest)
    return await plan_completion(body, service, owner)


async def _plan_chat(body: GenerationRequest, service: Service, owner: str | None) -> CompletionPlan:
    assert isinstance(body, ChatRequest)
    return await plan_chat(body, service, owner)


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, _plan_chat),
    "/v1/completions": Endpoint(CompletionRequest, _plan_completion),
}


def result_id(batch: Batch, n: int) -> str:
    """Return the id of the result of the n-th line."""
    return f"batch_req_{line_digest(batch.batch_id, n)}"


def has_failed(result: Mapping[str, Mapping[str, object] | None]) -> bool:
    """Whether a result is that of a line without an answer."""
    response = result["response"]
    return response is None or response["status_code"] != 200


async def compute_line(
    service: Service, batch: Batch, raw: RawLine, wait: Callable[[], Awaitable[object]], *, is_repeated: bool
) -> tuple[str, bool]:
    """Compute a line; return its result as JSON, and whether it has failed.

    Raises EngineDiedError if no engine is left.
    wait: returns when another line has ended, which leaves its places in the queue. is_repeated: a line before has the
    same custom_id.
    """
    settings = service.options.settings
    custom_id: str | None = None
    response: dict[str, object] | None = None
    error: dict[str, object] | None = None
    try:
        line = line_of(raw, settings.max_body_bytes, ENDPOINTS, is_repeated=is_repeated)
        custom_id = line.custom_id
        try:
            status, body = 200, await _compute(service, batch, raw, line, wait)
        except EngineDiedError:
            raise
        except Exception as failure:
            told = to_service_error(failure)
            status, body = status_of(told), dict(error_body(told))
        response = {"status_code": status, "request_id": f"req_{line_digest(batch.batch_id, raw.n)}", "body": body}
    except EngineDiedError:
        raise
    except Exception as failure:  # no request could be read
        told = to_service_error(failure)
        error = {"code": told.code, "message": str(told), "line": raw.n}
    result: dict[str, Any] = {
        "id": result_id(batch, raw.n),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return await service.in_thread(_ENCODER.encode, result), has_failed(result)


async def _compute(
    service: Service, batch: Batch, raw: RawLine, line: BatchLine, wait: Callable[[], Awaitable[object]]
) -> dict[str, object]:
    """Return the answer to a line."""
    endpoint, started_at = ENDPOINTS[line.url], time.perf_counter()
    fields, _ = take_fields(line.body, endpoint.schema, strict=service.options.settings.strict_fields)
    body = endpoint.schema.model_validate(fields)
    _check_together(body)
    if body.seed in (None, DRAW):
        body = body.model_copy(update={"seed": line_seed(batch.batch_id, raw.n)})
    while True:
        try:
            with planned(service, Place(batch.owner), len(raw.data or b"")) as planning:
                plan = _of_line(await endpoint.plan(body, planning, batch.owner), batch, raw.n)
            stream = service.using(plan.model).submit(plan.requests, batch.owner)
            break
        except QueueFullError:  # of the choices of other lines: one alone that does not fit is refused
            await wait()
    run = CompletionRun(plan, service, started_at)
    run.is_failed = True
    collected: list[list[Delta]] = [[] for _ in plan.requests]
    try:
        with expiring(stream, plan.remaining_s(time.perf_counter() - started_at)):
            async for outputs in stream:
                for output in outputs:
                    if (added := run.add(output, stream)) is not None:
                        collected[added[0]].append(added[1])
        run.is_failed = False
    finally:
        stream.abort()
        run.close()
    return plan.whole(collected, run.output.usage())


def _of_line(plan: CompletionPlan, batch: Batch, n: int) -> CompletionPlan:
    """Return a plan with the ids and the time of a line, whose requests wait behind all others."""
    completion_id = f"{plan.shape.id_prefix}{line_digest(batch.batch_id, n)}"
    identity = replace(plan.identity, completion_id=completion_id, created=batch.created)
    requests = tuple(
        replace(request, request_id=f"{completion_id}-{i}", is_filler=True) for i, request in enumerate(plan.requests)
    )
    return replace(plan, identity=identity, requests=requests)


def _check_together(body: GenerationRequest) -> None:
    """Raise InvalidRequestError for what has no sense in a batch."""
    for name in ("stream", "background", "request_id"):
        if getattr(body, name):
            raise InvalidRequestError(f"{name} may not be given in a batch", param=name)
