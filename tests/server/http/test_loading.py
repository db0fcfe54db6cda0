from __future__ import annotations

import asyncio
from typing import Literal

import httpx
import pytest
from starlette.responses import PlainTextResponse

from gptserve.server.http.loading import LoadingApp, Progress


def ask(loading_app: LoadingApp, method: str, path: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(loading_app), base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(send())


@pytest.mark.parametrize("status", ["downloading", "loading"])
def test_until_the_model_is_loaded_all_get_503_and_health_tells_the_progress(
    status: Literal["downloading", "loading"],
) -> None:
    loading_app = LoadingApp(lambda: Progress(status, 1 / 3, "a third is here"))
    refused, health = ask(loading_app, "POST", "/v1/completions"), ask(loading_app, "GET", "/health")

    assert refused.json()["error"] == {
        "message": f"the model is {status}: a third is here; try again later",
        "type": "server_error",
        "param": None,
        "code": "loading",
    }
    told = health.json()
    assert told.pop("elapsed_s") >= 0
    assert told == {"status": status, "progress": 0.333, "detail": "a third is here"}
    for response in (refused, health):
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")


def test_once_it_is_open_it_passes_everything_on() -> None:
    loading_app = LoadingApp(lambda: Progress("loading", 1.0, "all is here"))
    loading_app.open(PlainTextResponse("in"))
    assert ask(loading_app, "GET", "/health").text == ask(loading_app, "POST", "/v1/completions").text == "in"
