"""The real application around the real engine, both in this process: no socket, no start of a server to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.weights.chat.template import ChatTemplate
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.runs import make_config
from tests.server.app_options import make_app

MODEL = "model"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def ask(
    folder: Path, tokenizer: Tokenizer, bodies: Sequence[dict[str, Any]], *, template: str = TEMPLATE, **options: Any
) -> list[httpx.Response]:
    """Return the answers to the bodies, one after the other; `options` are the fields of EngineConfig."""

    async def converse() -> list[httpx.Response]:
        async with started(ThreadClient(partial(load_engine, make_config(folder, **options)))) as engine:
            chat_template = ChatTemplate(template, {})
            app = make_app(engine, tokenizer, MODEL, chat_template=chat_template)
            with closing(chat_template):
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                    return [await client.post(_path(body), json=body) for body in bodies]

    return asyncio.run(asyncio.wait_for(converse(), LIMIT_S))


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"
