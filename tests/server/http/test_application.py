"""The scopes of ASGI that are no requests, as other servers than ours send them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect

from tests.server.conftest import Api
from tests.server.fake_engine import FakeEngineClient

ALL_MIDDLEWARES: dict[str, Any] = {
    "allowed_hosts": "llm.example",
    "allowed_origins": "*",
    "api_keys": ("secret",),
    "root_path": "/llm",
}


@pytest.fixture(params=[{}, ALL_MIDDLEWARES], ids=["defaults", "all middlewares"])
def application(request: pytest.FixtureRequest, make_api: Callable[..., Api]) -> Any:
    return make_api(FakeEngineClient(), **request.param).app


def exchange(application: Any, scope: dict[str, Any], *received: Message) -> list[Message]:
    """Return what the application sends on this scope."""
    sent: list[Message] = []
    messages = iter(received)

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(application({"asgi": {"version": "3.0"}, **scope}, receive, send), 20))
    return sent


def test_a_server_may_announce_its_life(application: Any) -> None:
    events = ({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    assert exchange(application, {"type": "lifespan", "state": {}}, *events) == [
        {"type": "lifespan.startup.complete"},
        {"type": "lifespan.shutdown.complete"},
    ]


@pytest.mark.parametrize("path", ["/", "/v1/completions", "/llm/v1/models"])
def test_a_websocket_is_refused(application: Any, path: str) -> None:
    scope = {"type": "websocket", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    [sent] = exchange(application, {**scope, "root_path": "", "scheme": "ws"}, {"type": "websocket.connect"})
    assert sent["type"] == "websocket.close"


def test_the_client_of_starlette_works(application: Any) -> None:
    headers = {"authorization": "Bearer secret"}
    with TestClient(application, base_url="http://llm.example", headers=headers) as client:
        assert client.get("/v1/models").status_code == 200
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/completions"):
            pass
