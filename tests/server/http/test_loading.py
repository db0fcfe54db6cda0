from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    loading_app = LoadingApp(lambda: Progress(status, 1 / 3, "a third is here"), patience_s=0.2)
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
    loading_app = LoadingApp(lambda: Progress("loading", 1.0, "all is here"), patience_s=0)
    loading_app.open(PlainTextResponse("in"))
    assert ask(loading_app, "GET", "/health").text == ask(loading_app, "POST", "/v1/completions").text == "in"


def post_early(meanwhile: Callable[[LoadingApp], object]) -> dict[str, int]:
    """Post a completion while a model loads, and call `meanwhile` once others have their answers; return all status."""

    async def post() -> dict[str, int]:
        status: Literal["downloading", "loading"] = "loading"
        loading_app = LoadingApp(lambda: Progress(status, 0.5, "half is here"), patience_s=3600)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(loading_app), base_url="http://test") as client:
            early = asyncio.create_task(client.post("/v1/completions"))
            told = {"GET": (await client.get("/v1/models")).status_code}
            assert not early.done()
            status = "downloading"
            told["downloading"] = (await client.post("/v1/completions")).status_code
            assert not early.done()
            meanwhile(loading_app)
            return {**told, "early": (await early).status_code}

    return asyncio.run(post())


def test_what_is_posted_while_a_model_loads_waits_for_it_and_is_answered() -> None:
    told = post_early(lambda loading_app: loading_app.open(PlainTextResponse("in")))
    assert told == {"GET": 503, "downloading": 503, "early": 200}


def test_what_waits_is_refused_once_the_start_is_given_up() -> None:
    assert post_early(LoadingApp.give_up) == {"GET": 503, "downloading": 503, "early": 503}
