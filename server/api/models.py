"""GET /v1/models and /v1/models/{id}: the models of this server, each under all its names."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from gptserve.server.completions.model import Model
from gptserve.server.completions.service import Service
from gptserve.server.schemas import completions as schemas
from gptserve.server.schemas.openapi import error_responses

_MODEL_ID = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_LINKS: dict[str, Any] = {
    "links": {"first": {"operationId": "retrieve_model", "parameters": {"model": "$response.body#/data/0/id"}}}
}


def models_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"])
    created = int(time.time())
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))

    def entry(name: str, model: Model) -> schemas.Model:
        service.using(model).check_alive()
        limit, defaults = model.engine.info.max_model_len, model.sampling_defaults
        return schemas.Model(
            id=name,
            display_name=name,
            created=created,
            created_at=created_at,
            owned_by="gptserve",
            max_model_len=limit,
            sampling_defaults=dict(defaults),
        )

    @router.get("/v1/models", summary="List the models", responses={200: _LINKS, **error_responses(401, 503)})
    async def list_models() -> schemas.ModelList:
        return schemas.ModelList(data=[entry(name, model) for name, model in service.models])

    # The id is a path: that of a hub model has a slash in it.
    @router.get(
        "/v1/models/{model:path}",
        summary="Describe a model",
        openapi_extra={"parameters": [_MODEL_ID]},
        responses=error_responses(401, 404, 503),
    )
    async def retrieve_model(request: Request) -> schemas.Model:
        name = request.path_params["model"]
        return entry(name, service.models.find(name))

    return router
