"""POST /v1/classify, /v1/score, /v1/rerank and /v2/rerank: labels of texts, and how well two texts fit."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gptserve.server.api.embeddings import answer_pooled
from gptserve.server.completions.service import Service
from gptserve.server.embeddings.scores import plan_classes, plan_ranking, plan_scores
from gptserve.server.schemas.openapi import error_responses, json_body
from gptserve.server.schemas.scores import (
    ClassifyList,
    ClassifyRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)

_REFUSALS = error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)


def classify_router(service: Service) -> APIRouter:
    """Return the route of labels, under both of its paths."""
    router = APIRouter(tags=["scores"])

    @router.post("/classify", include_in_schema=False)
    @router.post(
        "/v1/classify",
        summary="Tell the probability of each label of texts",
        openapi_extra=json_body(ClassifyRequest),
        responses={200: {"model": ClassifyList, "description": "The probabilities of each input"}, **_REFUSALS},
    )
    async def classify(request: Request) -> Response:
        return await answer_pooled(request, service, ClassifyRequest, plan_classes)

    return router


def scores_router(service: Service) -> APIRouter:
    """Return the routes of pairs, under each of their paths."""
    router = APIRouter(tags=["scores"])

    @router.post("/score", include_in_schema=False)
    @router.post(
        "/v1/score",
        summary="Score pairs of texts",
        openapi_extra=json_body(ScoreRequest),
        responses={200: {"model": ScoreList, "description": "A score of each pair"}, **_REFUSALS},
    )
    async def score(request: Request) -> Response:
        return await answer_pooled(request, service, ScoreRequest, plan_scores)

    @router.post("/rerank", include_in_schema=False)
    @router.post(
        "/v1/rerank",
        summary="Sort documents by how well they answer a query, in Jina's shape",
        openapi_extra=json_body(RerankRequest),
        responses={200: {"model": Ranking, "description": "The documents, the best first"}, **_REFUSALS},
    )
    async def rerank(request: Request) -> Response:
        return await answer_pooled(request, service, RerankRequest, partial(plan_ranking, "v1"))

    @router.post(
        "/v2/rerank",
        summary="Sort documents by how well they answer a query, in Cohere's shape",
        openapi_extra=json_body(RerankRequest),
        responses={200: {"model": Ranking, "description": "The documents, the best first"}, **_REFUSALS},
    )
    async def rerank_v2(request: Request) -> Response:
        return await answer_pooled(request, service, RerankRequest, partial(plan_ranking, "v2"))

    return router
