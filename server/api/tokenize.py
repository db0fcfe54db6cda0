"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in vLLM's shapes.

As in all prompts, the text of a special token is that token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.api.background import owner_of
from gptserve.server.api.completions import read_body
from gptserve.server.completions.admission import planned
from gptserve.server.completions.chat import check_conversation, encode_conversation
from gptserve.server.completions.encoding import json_response
from gptserve.server.completions.planning import Place
from gptserve.server.completions.prompt import blaming, check_length
from gptserve.server.completions.service import Service
from gptserve.server.schemas.openapi import error_responses, json_body
from gptserve.server.schemas.tokens import (
    ConversationToTokenize,
    DetokenizedText,
    TextToTokenize,
    TokenizerInfo,
    Tokens,
    TokensToText,
)
from gptserve.server.text.output import token_name

TOKENIZE_BODIES = (TextToTokenize, ConversationToTokenize, TokensToText)
_ERRORS = error_responses(400, 401, 404, 408, 413, 415, 429, 503)


def tokenize_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["tokens"])

    @router.post(
        "/tokenize",
        summary="Turn a text or a conversation into tokens",
        openapi_extra=json_body(TextToTokenize, ConversationToTokenize),
        responses={200: {"model": Tokens}, **_ERRORS},
    )
    async def tokenize(request: Request) -> Response:
        service.check_alive()
        _, body, num_bytes = await read_body(request, service, _model_of)
        asked = service.naming(body.model)
        if isinstance(body, ConversationToTokenize):
            check_conversation(body, asked)
        else:
            check_length(body.prompt, asked)
        with planned(asked, Place(owner_of(request), receive=request.receive), num_bytes) as planning:
            return await planning.in_worker(_tokenize, body, asked)

    @router.post(
        "/detokenize",
        summary="Turn tokens into text",
        openapi_extra=json_body(TokensToText),
        responses={200: {"model": DetokenizedText}, **_ERRORS},
    )
    async def detokenize(request: Request) -> Response:
        service.check_alive()
        _, body, _ = await read_body(request, service, lambda _: TokensToText)
        asked = service.naming(body.model)
        _check_tokens(body.tokens, asked)
        return await service.in_thread(_detokenize, body.tokens, asked)

    @router.get(
        "/tokenizer_info",
        summary="Describe the tokenizer",
        responses={200: {"model": TokenizerInfo}, **error_responses(401, 503)},
    )
    async def tokenizer_info() -> Response:
        service.check_alive()
        return JSONResponse(_tokenizer_info(service))

    return router


def _model_of(fields: Mapping[str, object]) -> type[TextToTokenize | ConversationToTokenize]:
    return ConversationToTokenize if fields.get("messages") is not None else TextToTokenize


def _check_tokens(token_ids: Sequence[int], service: Service) -> None:
    """Raise InvalidRequestError for more tokens than a prompt may have, or for ids that the model does not have."""
    info = service.model.engine.info
    if len(token_ids) > info.max_model_len:
        rule = f"tokens may be at most {info.max_model_len}, this model's context, got {len(token_ids)}"
        raise InvalidRequestError(rule, param="tokens", code="context_length_exceeded")
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size), None)
    if wrong is not None:
        message = f"tokens: token ids must be in [0, {info.vocab_size}), got {wrong}"
        raise InvalidRequestError(message, param="tokens")


def _tokenize(body: TextToTokenize | ConversationToTokenize, service: Service) -> Response:
    if isinstance(body, ConversationToTokenize):
        token_ids = encode_conversation(body, service, add_special=bool(body.add_special_tokens))
    else:
        add_special = body.add_special_tokens is not False
        with blaming("prompt"):
            token_ids = service.model.tokenizer.encode_with_special(body.prompt, template=add_special)
    texts = (token_name(service.model.tokenizer.token_bytes(token_id)) for token_id in token_ids)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": service.model.engine.info.max_model_len,
            "tokens": iter(token_ids),
            "token_strs": texts if body.return_token_strs else None,
        }
    )


def _detokenize(token_ids: Sequence[int], service: Service) -> Response:
    data = b"".join(map(service.model.tokenizer.token_bytes, token_ids))
    return json_response({"prompt": data.decode(errors="replace")})


def _tokenizer_info(service: Service) -> dict[str, object]:
    info: dict[str, object] = {}
    if eos := service.model.engine.info.eos_token_ids:
        info["eos_token"] = token_name(service.model.tokenizer.token_bytes(eos[0]))
    info |= service.model.tokenizer_info
    if service.model.chat_template is not None:
        info["chat_template"] = service.model.chat_template.source
    return info
