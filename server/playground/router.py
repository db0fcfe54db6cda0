"""GET /, the playground: a page without a framework, and GET /playground/engine, what it shows of the engine.

The page calls the same routes as every other client. It loads nothing from elsewhere and has no inline script or style,
which its Content-Security-Policy holds it to. Only a browser gets it: any other client of / gets the 404 of an unknown
route.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gptserve.server.completions.service import Service
from gptserve.server.playground.engine_view import EngineView
from gptserve.server.schemas.base import _Model
from gptserve.server.schemas.openapi import error_responses

_PREFIX = "/playground/"
_PAGE = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = ("playground.css", "playground.js", "api.js", "channels.js", "tokens.js", "engine.js", "link.js", "icon.svg")
PAGE_PATHS = frozenset({"/", *(f"{_PREFIX}{name}" for name in _FILES)})
"""Open without a key: the page asks for it."""
ENGINE_PATH = f"{_PREFIX}engine"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


class BlockCells(_Model):
    """The blocks of the KV cache, each cell of `blocks_per_cell` neighbours one character."""

    blocks_per_cell: int
    cells: str
    """a dot: blank; c: cached, found again by its content; a digit: so many sequences hold it, 9 stands for more"""


class EngineState(_Model):
    """What the playground shows of the engine, beside /metrics."""

    model: str
    system_fingerprint: str
    batch_invariant: bool
    max_model_len: int
    has_chat_template: bool
    marks: Mapping[int, str] | None
    """the special tokens that frame the messages of an answer to a chat, by id; null for a model without them"""
    block_size: int
    num_blocks: int
    num_running: int
    num_waiting: int
    blocks: BlockCells | None
    """null while no engine is ready"""


def playground_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["playground"])
    model = service.model
    engine, view = model.engine, EngineView(model.engine)
    files = {name: (Path(__file__).parent / name).read_bytes() for name in (_PAGE, *_FILES)}

    def sent(name: str) -> Response:
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=_HEADERS)

    @router.get("/", include_in_schema=False)
    async def playground(request: Request) -> Response:
        """Send the page to a browser."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return sent(_PAGE)

    @router.get(
        ENGINE_PATH,
        summary="State of the engine: its queue, and a map of its KV cache",
        responses=error_responses(401, 503),
    )
    async def engine_state() -> EngineState:
        service.check_alive()
        blocks, info, stats = await view.block_map(), engine.info, engine.stats
        return EngineState(
            model=model.name,
            system_fingerprint=info.fingerprint,
            batch_invariant=info.batch_invariant,
            max_model_len=info.max_model_len,
            has_chat_template=model.chat_template is not None,
            marks=model.dialect.marks,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            num_running=stats.num_running,
            num_waiting=service.metrics.num_waiting,
            blocks=None if blocks is None else BlockCells(blocks_per_cell=blocks.blocks_per_cell, cells=blocks.cells),
        )

    @router.get(_PREFIX + "{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise HTTPException(404)
        return sent(name)

    return router
