"""langchain-cohere: documents ranked and a retriever's compressed, by /v2/rerank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import Environment
from tests.clients.servers import post, ranks_documents

CLIENT = "langchain-cohere"
pytestmark = pytest.mark.clients
DOCUMENTS = ["The cat sat on the mat.", "a banana", "two tabs"]


def rank(url: str, documents: list[str]) -> dict[str, Any]:
    from langchain_cohere import CohereRerank
    from langchain_core.documents import Document

    ranker = CohereRerank(model="tiny", base_url=url, cohere_api_key="none", top_n=2)
    ranked = ranker.rerank(documents, "a cat")
    kept = ranker.compress_documents([Document(text) for text in documents], "a cat")
    return {
        "ranked": [[its["index"], its["relevance_score"]] for its in ranked],
        "kept": [[its.page_content, its.metadata["relevance_score"]] for its in kept],
    }


def test_documents_are_ranked(client: Environment, chat_model: Path, tmp_path: Path) -> None:
    with ranks_documents(chat_model, tmp_path / "model") as url:
        found = client.call(rank, url, DOCUMENTS)
        asked = post(url, "v2/rerank", query="a cat", documents=DOCUMENTS, top_n=2)

    order = [(its["index"], its["relevance_score"]) for its in asked["results"]]
    assert found == {
        "ranked": [[index, score] for index, score in order],
        "kept": [[DOCUMENTS[index], score] for index, score in order],
    }
