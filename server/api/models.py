"""GET /v1/models and /v1/models/{id}: the one model this server has."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request

from gptserve.server.api.openapi import error_responses
from gptserve.server.api.schemas import Model, ModelList
from gptserve.server.completions.service import Service

_MODEL_ID = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


def models_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def model() -> Model:
        service.check_alive()
        limit = service.engine.info.max_model_len
        return Model(id=service.options.model_name, created=created, owned_by="gptserve", max_model_len=limit)

    @router.get("/v1/models", summary="List the models", responses=error_responses(401, 503))
    async def list_models() -> ModelList:
        return ModelList(data=[model()])

    # The id is a path: that of a hub model has a slash in it.
    @router.get(
        "/v1/models/{model:path}",
        summary="Describe a model",
        openapi_extra={"parameters": [_MODEL_ID]},
        responses=error_responses(401, 404, 503),
    )
    async def retrieve_model(request: Request) -> Model:
        service.check_model(request.path_params["model"])
        return model()

    return router
