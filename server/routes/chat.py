"""POST /v1/chat/completions: OpenAI's chat with vLLM's extra fields, as JSON or as a stream of events."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from server.chat import plan_chat
from server.harmony import find_marks
from server.routes.completions import add_completion_route
from server.schemas import ChatCompletion, ChatCompletionChunk, ChatRequest
from server.service import Service
from server.store import CompletionStore


def chat_router(service: Service, store: CompletionStore) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["chat"])
    add_completion_route(
        router,
        service,
        store,
        partial(plan_chat, marks=find_marks(service.tokenizer)),
        path="/v1/chat/completions",
        summary="Answer a conversation",
        models=(ChatRequest, ChatCompletion, ChatCompletionChunk),
    )
    return router
