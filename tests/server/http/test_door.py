from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from gptserve.server.http.door import Door


def ask(door: Door, method: str, path: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(send())


@pytest.mark.parametrize(("done", "total", "share", "text"), [(0, 0, 0.0, "0%"), (1, 3, 0.333, "33%")])
def test_until_the_door_is_open_all_get_503_and_health_tells_the_progress(
    done: int, total: int, share: float, text: str
) -> None:
    door = Door(lambda: (done, total))
    refused, health = ask(door, "POST", "/v1/completions"), ask(door, "GET", "/health")

    assert refused.json()["error"] == {
        "message": f"the model is loading: {text} of the weights are read; try again later",
        "type": "server_error",
        "param": None,
        "code": "loading",
    }
    assert (health.json()["status"], health.json()["progress"]) == ("loading", share)
    assert health.json()["elapsed_s"] >= 0
    for response in (refused, health):
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")


def test_an_open_door_passes_everything_on() -> None:
    door = Door(lambda: (1, 1))
    door.open(PlainTextResponse("in"))
    assert ask(door, "GET", "/health").text == ask(door, "POST", "/v1/completions").text == "in"
