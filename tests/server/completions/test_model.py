"""Models by their names: each request is computed by the one that it names."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gptserve.server.app import create_app
from gptserve.server.batches.folder import FolderBatchStore
from gptserve.server.completions.model import ModelRegistry
from gptserve.server.core.errors import ServiceError
from gptserve.server.files.folder import FolderFileStore
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from tests.server.app_options import model_and_options
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient

NAMES = {"small": ("small", "s"), "large": ("large",)}


def registry() -> tuple[ModelRegistry, dict[str, FakeEngineClient]]:
    """Return two models, and their engines by the first of their names."""
    engines = {name: FakeEngineClient(info=replace(INFO, fingerprint=name)) for name in NAMES}
    models = [model_and_options(engines[name], ByteTokenizer(), name, aliases=NAMES[name][1:])[0] for name in NAMES]
    return ModelRegistry(*models), engines


@pytest.mark.parametrize(
    ("name", "expected"), [(None, "small"), ("small", "small"), ("s", "small"), ("large", "large")]
)
def test_a_name_leads_to_its_model_and_none_to_the_first(name: str | None, expected: str) -> None:
    models, engines = registry()
    assert models.find(name).engine is engines[expected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("claude-", "small"),
        ("claude-opus-5", "small"),
        ("claude-large", "large"),
        ("gpt-mini", "large"),
        ("large", "large"),
    ],
)
def test_a_pattern_leads_to_the_first_model_that_has_one_but_a_name_comes_before(name: str, expected: str) -> None:
    engines = {name: FakeEngineClient(info=replace(INFO, fingerprint=name)) for name in NAMES}
    patterns = {"small": ("claude-*",), "large": ("claude-*", "gpt*mini")}
    names = {"small": ("small",), "large": ("large", "claude-large")}
    models = [
        model_and_options(
            engines[of], ByteTokenizer(), of, aliases=names[of][1:], name_patterns=patterns[of], max_new_tokens=9
        )[0]
        for of in NAMES
    ]
    found = ModelRegistry(*models).find(name)
    assert (found.engine, found.name) == (engines[expected], expected)


@pytest.mark.parametrize("name", ["claude", "xclaude-", "Claude-1", "gptmini2", "gpt-min", "*"])
def test_what_no_pattern_matches_is_refused_and_no_pattern_is_told(name: str) -> None:
    model, _ = model_and_options(FakeEngineClient(), ByteTokenizer(), name_patterns=("claude-*", "gpt*mini"))
    with pytest.raises(ServiceError, match=r"does not exist; this server has 'm'$"):
        ModelRegistry(model).find(name)


@pytest.mark.parametrize("name", ["", "Small", "small ", "x"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ServiceError) as refused:
        registry()[0].find(name)
    assert str(refused.value).endswith(" does not exist; this server has 'small', 's', 'large'")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_completion_of_an_earlier_server_is_read_with_its_model_or_else_the_first() -> None:
    models, engines = registry()
    assert models.find_kept("large").engine is engines["large"]
    assert models.find_kept("gone").engine is engines["small"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("name", "answers"), [("s", "small"), ("large", "large")])
def test_a_request_is_computed_by_the_model_that_it_names(name: str, answers: str, background: bool) -> None:
    models, engines = registry()

    async def ask() -> dict[str, Any]:
        _, options = model_and_options(FakeEngineClient(), ByteTokenizer())
        store = SqliteJobStore(None)
        app = create_app(models, options, store, FolderFileStore(None), FolderBatchStore(None))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"model": name, "prompt": "hi", "max_tokens": 2}
            headers = {"idempotency-key": "k"} if background else {}
            answer: dict[str, Any] = (await client.post("/v1/completions", json=body, headers=headers)).json()
        await app.state.jobs.settle()
        await store.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(ask(), 20))
    assert (answer["model"], answer["system_fingerprint"]) == (answers, answers)
    assert [key for key, engine in engines.items() if engine.submitted] == [answers]
