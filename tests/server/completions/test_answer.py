"""The event loop while the scores of many tokens are turned into answers: between two of its turns little is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gptserve.engine.request import MAX_SCORES_PER_OUTPUT
from tests.server.conftest import Api
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient

NUM_TOKENS = 40 * MAX_SCORES_PER_OUTPUT
NUM_TOP = 20
BODY = {"prompt": [97] * NUM_TOKENS, "max_tokens": 2, "prompt_logprobs": NUM_TOP}
ECHO = {"prompt": [97] * NUM_TOKENS, "max_tokens": 2, "echo": True, "logprobs": NUM_TOP}


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens that are looked up on the main thread, which runs the event loop, since its latest turn."""

    def __init__(self) -> None:
        super().__init__()
        self.num_looked_up = 0
        self.most = 0
        self.total = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.total += 1
        if threading.current_thread() is threading.main_thread():
            self.num_looked_up += 1
            self.most = max(self.most, self.num_looked_up)
        return super().token_bytes(token_id)

    async def begin_turns(self) -> None:
        while True:
            self.num_looked_up = 0
            await asyncio.sleep(0)


async def ask(api: Api, method: str, path: str, **arguments: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://test") as client:
        return await client.request(method, path, **arguments)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", ["whole", "stream", pytest.param("background", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", [BODY, ECHO], ids=["prompt_logprobs", "echo"])
def test_the_event_loop_turns_between_pieces_of_scores(
    make_api: Callable[..., Api], fields: dict[str, Any], way: str
) -> None:
    if way == "stream" and "prompt_logprobs" in fields:
        pytest.skip("prompt_logprobs are refused in a stream")
    tokenizer = CountingTokenizer()
    engine = FakeEngineClient(auto=False, info=replace(INFO, max_model_len=2 * NUM_TOKENS))
    api = make_api(engine, tokenizer)

    async def scenario() -> None:
        turns = asyncio.create_task(tokenizer.begin_turns())
        body = fields | {"stream": way == "stream", "background": way == "background"}
        asking = asyncio.create_task(ask(api, "POST", "/v1/completions", json=body))
        await asyncio.to_thread(engine.wait_for, lambda: bool(engine.live_ids))
        while engine.live_ids:
            engine.step()  # all outputs arrive within one turn
        response = await asking
        if way == "background":
            path = f"/v1/completions/{response.json()['id']}"
            events = await ask(api, "GET", path + "/events")
            assert events.text.count("decoded_token") in (0, (NUM_TOKENS - 1) * (1 + NUM_TOP))
            await ask(api, "GET", path)
        turns.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert tokenizer.total >= NUM_TOKENS * NUM_TOP
    assert 0 < tokenizer.most <= 2 * MAX_SCORES_PER_OUTPUT * (1 + NUM_TOP)
