"""Anthropic's Messages API: POST /v1/messages and POST /v1/messages/count_tokens.

A message is a chat in another shape, with errors in Anthropic's envelope. Nothing of it is stored. The headers
anthropic-version and anthropic-beta are taken, and change nothing.
"""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.api.background import owner_of
from gptserve.server.api.completions import read_body
from gptserve.server.completions.admission import planned
from gptserve.server.completions.answer import CompletionResponse
from gptserve.server.completions.planning import Place
from gptserve.server.completions.service import Service
from gptserve.server.http.envelope import log_fields
from gptserve.server.messages.plan import count_tokens, plan_message, unread_budget
from gptserve.server.messages.stream import MessageEncoder
from gptserve.server.schemas.message_fields import take_message_fields
from gptserve.server.schemas.messages import (
    CountedTokens,
    MessageEvent,
    MessageObject,
    MessagesErrorBody,
    MessagesRequest,
    TokenCountRequest,
)
from gptserve.server.schemas.openapi import error_responses, event_stream, json_body

_PATH = "/v1/messages"
_BUDGET = "thinking.budget_tokens"
_ERRORS = error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, body=MessagesErrorBody)


def messages_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["messages"])

    @router.post(
        _PATH,
        summary="Answer a conversation in the shape of Anthropic's API",
        openapi_extra=json_body(MessagesRequest),
        responses={
            200: {
                "model": MessageObject,
                "description": "The answer; with `stream` as events, the last of them message_stop",
                **event_stream(MessageEvent, error=MessagesErrorBody, end=None),
            },
            **_ERRORS,
        },
    )
    async def create_message(request: Request) -> Response:
        started_at = time.perf_counter()
        owner = owner_of(request)
        service.admit(owner)  # refuse before reading megabytes
        _, body, num_bytes = await read_body(request, service, lambda _: MessagesRequest, take_message_fields)
        with planned(service, Place(owner, started_at, receive=request.receive), num_bytes) as planning:
            plan = await plan_message(body, planning, owner)
        if unread_budget(body, service):
            _note_unread_budget(request, service)
        return CompletionResponse(service, plan, started_at, MessageEncoder(plan))

    @router.post(
        f"{_PATH}/count_tokens",
        summary="Count the tokens that the prompt of a message would have",
        openapi_extra=json_body(TokenCountRequest),
        responses={200: {"model": CountedTokens}, **_ERRORS},
    )
    async def count_message_tokens(request: Request) -> Response:
        service.check_alive()
        _, body, num_bytes = await read_body(request, service, lambda _: TokenCountRequest, take_message_fields)
        with planned(service, Place(owner_of(request), receive=request.receive), num_bytes) as planning:
            counted = await count_tokens(body, planning)
        return JSONResponse(CountedTokens(input_tokens=counted).model_dump())

    return router


def _note_unread_budget(request: Request, service: Service) -> None:
    """Report that the budget of the thinking is not kept. Raises InvalidRequestError with --strict-fields."""
    if service.options.settings.strict_fields:
        message = f"{_BUDGET}: the thinking of this model cannot be limited"
        raise InvalidRequestError(message, param=_BUDGET, code="unsupported_parameter")
    fields = log_fields(request.scope)
    fields["ignored"] = ", ".join(filter(None, (fields.get("ignored"), _BUDGET)))
