"""POST /v1/chat/completions: OpenAI's chat with vLLM's extra fields, as JSON or as a stream of events."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from gptserve.server.api.completions import add_completion_route
from gptserve.server.api.schemas import ChatCompletion, ChatCompletionChunk, ChatRequest
from gptserve.server.background.store import BackgroundStore
from gptserve.server.completions.chat import plan_chat
from gptserve.server.completions.harmony import find_marks
from gptserve.server.completions.service import Service


def chat_router(service: Service, store: BackgroundStore) -> APIRouter:
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
