"""Cohere's client: documents ranked, by both of its versions of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import post, ranks_documents

CLIENT = "cohere"
pytestmark = pytest.mark.clients
DOCUMENTS = ["The cat sat on the mat.", "a banana", "two tabs"]


def rank(url: str, documents: list[str]) -> dict[str, Any]:
    import asyncio

    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url)
    ranked = client.rerank(model="tiny", query="a cat", documents=documents)
    best = client.rerank(model="tiny", query="a cat", documents=documents, top_n=1, max_tokens_per_doc=64)

    async def in_loop() -> Any:
        async with cohere.AsyncClientV2(api_key="none", base_url=url) as in_loop:
            return await in_loop.rerank(model="tiny", query="a cat", documents=documents)

    of_v1 = cohere.Client(api_key="none", base_url=url)
    old = of_v1.rerank(model="tiny", query="a cat", documents=documents, return_documents=True)
    refused = ""
    try:
        client.rerank(model="other", query="a cat", documents=documents)
    except cohere.NotFoundError as error:
        refused = error.body["error"]["message"]
    awaited = asyncio.run(in_loop())
    return {
        "ranked": [[[its.index, its.relevance_score] for its in found.results] for found in (ranked, awaited, old)],
        "best": [its.index for its in best.results],
        "documents": [its.document.text for its in old.results],
        "num_tokens": ranked.meta.tokens.input_tokens,
        "refused": refused,
    }


def test_documents_are_ranked(client: Environment, chat_model: Path, tmp_path: Path) -> None:
    with ranks_documents(chat_model, tmp_path / "model") as url:
        found = client.call(rank, url, DOCUMENTS)
        asked = post(url, "v2/rerank", query="a cat", documents=DOCUMENTS)

    order = [[its["index"], its["relevance_score"]] for its in asked["results"]]
    assert found["ranked"] == [order] * 3
    assert found["best"] == [order[0][0]]
    assert found["documents"] == [DOCUMENTS[index] for index, _ in order]
    assert found["num_tokens"] == asked["usage"]["prompt_tokens"]
    assert found["refused"] == "model 'other' does not exist; this server has 'tiny'"
