"""The real application around the real engine, both in this process: no socket, no start of a server to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

from gptserve.engine.process.factory import load_engine
from gptserve.engine.process.thread_client import ThreadClient
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.weights.chat.template import ChatTemplate
from tests.engine.client_harness import LIMIT_S, started
from tests.engine.runs import make_config
from tests.server.app_options import make_app

MODEL = "model"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def ask(
    folder: Path,
    tokenizer: Tokenizer,
    bodies: Sequence[dict[str, Any]],
    *,
    template: str = TEMPLATE,
    headers: Sequence[dict[str, str]] = (),
    **options: Any,
) -> list[httpx.Response]:
    """Return the answers to the bodies, one after the other, each with its headers if there are any.

    `options` are the fields of EngineConfig. Each call is a server of its own.
    """
    requests = list(zip_longest(bodies, headers))

    async def converse() -> list[httpx.Response]:
        async with started(ThreadClient(partial(load_engine, make_config(folder, **options)))) as engine:
            chat_template, store = ChatTemplate(template, {}), SqliteJobStore(None)
            app = make_app(engine, tokenizer, MODEL, store, chat_template=chat_template)
            with closing(chat_template):
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                    answers = [await client.post(_path(body), json=body, headers=given) for body, given in requests]
            await store.close()
            return answers

    return asyncio.run(asyncio.wait_for(converse(), LIMIT_S))


def _path(body: dict[str, Any]) -> str:
    if "input" in body:
        return "/v1/responses"
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"
