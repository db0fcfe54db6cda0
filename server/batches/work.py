"""Computes the lines of a batch: each is a completion behind all others (Request.is_filler), answered in one piece.

One that servers may have died of does not wait behind others: those might die meanwhile, for which it would be blamed.

`ENDPOINTS` is the one table of what a line may ask for. A line's ids, its time and, without a seed of its own, its seed
are drawn from the batch and its number: whoever computes it again gets the same. Knows no HTTP and no files.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from gptserve.engine.errors import EngineDiedError, InvalidRequestError, QueueFullError
from gptserve.engine.process.client import TokenStream
from gptserve.server.batches.lines import BatchLine, RawLine, line_digest, line_of, line_seed
from gptserve.server.completions.admission import leave, planned
from gptserve.server.completions.chat import plan_chat
from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.plan import CompletionPlan, plan_completion
from gptserve.server.completions.planning import Place
from gptserve.server.completions.run import CompletionRun, expiring
from gptserve.server.completions.service import Service
from gptserve.server.core.error_responses import error_body, status_of, to_service_error
from gptserve.server.core.errors import ServiceError
from gptserve.server.embeddings.plan import plan_embeddings
from gptserve.server.embeddings.run import PooledPlan, PooledRun
from gptserve.server.responses.plan import plan_response
from gptserve.server.schemas.completions import ChatRequest, CompletionRequest
from gptserve.server.schemas.embeddings import EmbeddingRequest
from gptserve.server.schemas.fields import take_fields
from gptserve.server.schemas.response_fields import take_response_fields
from gptserve.server.schemas.responses import ItemReference, ResponsesRequest, StoredRequest
from gptserve.server.schemas.seed import DRAW
from gptserve.server.text.output import Delta
from gptserve.weights.pooling import Task

_ENDS = ("draining", "engine_unavailable")  # codes of errors of the server, which another one may not have
_ENCODER = PiecewiseEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the lines of a batch have in common. `created` is in seconds since the epoch.

    is_filler: whether they wait behind all other requests.
    """

    batch_id: str
    created: int
    owner: str | None = None
    is_filler: bool = True


Take = Callable[..., tuple[dict[str, object], list[str]]]
Plan = CompletionPlan | PooledPlan
Wait = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to read the body of a line, which fields have no sense in it, and how to plan it."""

    schema: type[BaseModel]
    take: Take
    refused: tuple[str, ...]
    plan: Callable[[Any, Service, str | None], Awaitable[Plan]]


async def _plan_response(body: ResponsesRequest, service: Service, owner: str | None) -> CompletionPlan:
    if not isinstance(body.input, str) and any(isinstance(item, ItemReference) for item in body.input):
        raise InvalidRequestError("an item_reference may not be given in a batch", param="input")
    given = {**dict(body), "store": False, "earlier": []}
    return await plan_response(StoredRequest.model_construct(**given), None, service, owner)


_OF_COMPLETIONS = ("stream", "background", "request_id")
_OF_RESPONSES = ("stream", "background", "store", "previous_response_id")

ENDPOINTS: Mapping[Task, Mapping[str, Endpoint]] = {
    "generate": {
        "/v1/chat/completions": Endpoint(ChatRequest, take_fields, _OF_COMPLETIONS, plan_chat),
        "/v1/completions": Endpoint(CompletionRequest, take_fields, _OF_COMPLETIONS, plan_completion),
        "/v1/responses": Endpoint(ResponsesRequest, take_response_fields, _OF_RESPONSES, _plan_response),
    },
    "embed": {"/v1/embeddings": Endpoint(EmbeddingRequest, take_fields, (), plan_embeddings)},
}
"""By the task of the server, and by url."""


def endpoints_of(service: Service) -> Mapping[str, Endpoint]:
    """Return what the lines of a batch may ask this server for, by url."""
    return ENDPOINTS.get(service.options.settings.engine.task, {})


def result_id(batch: Batch, n: int) -> str:
    """Return the id of the result of the n-th line."""
    return f"batch_req_{line_digest(batch.batch_id, n)}"


def has_failed(result: Mapping[str, Mapping[str, object] | None]) -> bool:
    """Whether a result is that of a line without an answer."""
    response = result["response"]
    return response is None or response["status_code"] != 200


async def compute_line(
    service: Service,
    batch: Batch,
    raw: RawLine,
    wait: Wait,
    urls: Collection[str] | None = None,
    *,
    is_repeated: bool = False,
) -> tuple[str, bool]:
    """Compute a line; return its result as JSON, and whether it has failed.

    Raises EngineDiedError if no engine is left, and ServiceError if the server shuts down.
    wait: returns when another line has ended, which leaves its places in the queue, or so many seconds are over.
    urls: those that it may have, of all that the server has. is_repeated: a line before has the same custom_id.
    """
    settings = service.options.settings
    custom_id: str | None = None
    response: dict[str, object] | None = None
    error: dict[str, object] | None = None
    try:
        line = line_of(raw, settings.max_body_bytes, urls or endpoints_of(service), is_repeated=is_repeated)
        custom_id = line.custom_id
        try:
            status, body = 200, await _compute(service, batch, raw, line, wait)
        except EngineDiedError:
            raise
        except Exception as failure:
            told = to_service_error(failure)
            if told.code in _ENDS:
                raise told from failure
            status, body = status_of(told), dict(error_body(told))
        response = {"status_code": status, "request_id": f"req_{line_digest(batch.batch_id, raw.n)}", "body": body}
    except EngineDiedError:
        raise
    except Exception as failure:  # no request could be read
        told = to_service_error(failure)
        if told.code in _ENDS:
            raise
        error = {"code": told.code, "message": str(told), "line": raw.n}
    result: dict[str, Any] = {
        "id": result_id(batch, raw.n),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return await service.in_thread(_ENCODER.encode, result), has_failed(result)


def failed_line(batch: Batch, raw: RawLine, code: str, message: str, max_bytes: int, urls: Collection[str]) -> str:
    """Return the result of a checked line that nobody computes, as JSON."""
    custom_id = line_of(raw, max_bytes, urls, is_repeated=False).custom_id
    error = {"code": code, "message": message, "line": raw.n}
    return _ENCODER.encode({"id": result_id(batch, raw.n), "custom_id": custom_id, "response": None, "error": error})


async def _compute(service: Service, batch: Batch, raw: RawLine, line: BatchLine, wait: Wait) -> dict[str, object]:
    """Return the answer to a line. While that is computed, the line is not held."""
    endpoint, started_at = endpoints_of(service)[line.url], time.perf_counter()
    num_bytes, body = len(raw.data or b""), _body_of(service, batch, raw.n, line)
    raw.let_go()
    line.body.clear()
    while True:
        try:
            place = Place(batch.owner, is_filler=True)
            with planned(service, place, num_bytes) as planning:
                plan = await endpoint.plan(body, planning, batch.owner)
                if isinstance(plan, PooledPlan):
                    return await _embed(_vectors_of_line(plan, batch, raw.n), planning, started_at, wait)
                plan = _of_line(plan, batch, raw.n)
                stream = planning.using(plan.model).submit(plan.requests, batch.owner)
            break
        except (QueueFullError, ServiceError) as error:
            await wait(_wait_s(error))
    del body
    return await _complete(plan, service, stream, started_at)


def _body_of(service: Service, batch: Batch, n: int, line: BatchLine) -> BaseModel:
    """Return the body of the n-th line with its seed, checked. Raises what is wrong with it."""
    endpoint = endpoints_of(service)[line.url]
    for name in endpoint.refused:
        if line.body.get(name) not in (None, False):
            raise InvalidRequestError(f"{name} may not be given in a batch", param=name)
    fields, _ = endpoint.take(line.body, endpoint.schema, strict=service.options.settings.strict_fields)
    body = endpoint.schema.model_validate(fields)
    if hasattr(body, "seed") and body.seed in (None, DRAW):
        body = body.model_copy(update={"seed": line_seed(batch.batch_id, n)})
    return body


def _wait_s(error: QueueFullError | ServiceError) -> float:
    """Return after how long a line may be let in that others or its owner's limits keep out, else raise the error."""
    told = to_service_error(error)
    if status_of(told) != 429 or told.retry_after_s is None:
        raise error
    return told.retry_after_s


async def _complete(
    plan: CompletionPlan, service: Service, stream: TokenStream, started_at: float
) -> dict[str, object]:
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
        service.limits.charge(plan.identity.owner, run.output.num_tokens)
    return plan.whole(collected, run.output.usage())


async def _embed(plan: PooledPlan, planning: Service, started_at: float, wait: Wait) -> dict[str, object]:
    """Return the vectors of a line, whose inputs take turns where they are more than fit into the queue."""
    run, start = PooledRun(planning, plan, started_at), 0
    run.is_failed = True
    try:
        while start < len(plan.requests):
            try:
                run.submit(start)
            except (QueueFullError, ServiceError) as error:
                await wait(_wait_s(error))
                continue
            leave(planning)
            await run.follow()
            start += plan.num_at_once
        run.is_failed = False
    finally:
        run.stop()
        run.close()
    return run.answer()


def _of_line(plan: CompletionPlan, batch: Batch, n: int) -> CompletionPlan:
    """Return a plan with the ids and the time of a line."""
    completion_id = f"{plan.shape.id_prefix}{line_digest(batch.batch_id, n)}"
    identity = replace(plan.identity, completion_id=completion_id, created=batch.created)
    requests = tuple(
        replace(request, request_id=f"{completion_id}-{i}", is_filler=batch.is_filler)
        for i, request in enumerate(plan.requests)
    )
    return replace(plan, identity=identity, requests=requests)


def _vectors_of_line(plan: PooledPlan, batch: Batch, n: int) -> PooledPlan:
    answer_id = f"embd-{line_digest(batch.batch_id, n)}"
    requests = tuple(
        replace(request, request_id=f"{answer_id}-{i}", is_filler=batch.is_filler)
        for i, request in enumerate(plan.requests)
    )
    return replace(plan, requests=requests)
