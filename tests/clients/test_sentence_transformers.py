"""sentence-transformers: folders that it writes, served; vectors and scores are those that it computes itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.clients.environments import Environment
from tests.clients.servers import CONTEXT, post, served
from tests.parity.models import write_model
from tests.parity.shapes import SHAPES

CLIENT = "sentence-transformers"
pytestmark = pytest.mark.clients
TEXTS = ["The cat sat", "and the mat, which is a longer text", "1000 years old"]
PROMPT = "Instruct: find it\nQuery:"
TOLERANCE = 1e-5
RERANKER = (
    "<|im_start|>system\nAnswer yes or no.<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    "default('Given a web search query, retrieve relevant passages that answer the query') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""The manner of the template that sentence-transformers' rerankers of Qwen3's kind come with."""


@pytest.fixture(scope="module")
def padded_model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of random weights whose tokenizer can pad, as sentence-transformers wants it."""
    folder, tokenizer = tmp_path_factory.mktemp("padded"), AutoTokenizer.from_pretrained(chat_model)
    model_type, fields = SHAPES["Qwen3"]
    write_model(folder, model_type, {**fields, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT})
    tokenizer.pad_token, tokenizer.chat_template = "<|endoftext|>", None
    tokenizer.save_pretrained(folder)
    return folder


def embed(source: str, target: str, pooling: str, prompt: str, texts: list[str]) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer, models

    body = models.Transformer(source)
    pool = models.Pooling(body.get_embedding_dimension(), pooling_mode=pooling)
    SentenceTransformer(
        modules=[body, pool, models.Normalize()], prompts={"query": prompt, "document": ""}, device="cpu"
    ).save(target)
    model = SentenceTransformer(target, device="cpu")
    return {
        "plain": model.encode(texts).tolist(),
        "query": model.encode(texts, prompt_name="query").tolist(),
        "short": model.encode(texts, truncate_dim=8, normalize_embeddings=True).tolist(),
    }


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
def test_vectors_are_its_own(client: Environment, padded_model: Path, tmp_path: Path, pooling: str) -> None:
    found = client.call(embed, str(padded_model), str(tmp_path / "model"), pooling, PROMPT, TEXTS)

    with served("--model", str(tmp_path / "model"), "--task", "embed", "--dtype", "float32") as url:

        def vectors(texts: list[str], **options: int) -> list[list[float]]:
            return [its["embedding"] for its in post(url, "embeddings", input=texts, **options)["data"]]

        for vector, expected in (
            (vectors(TEXTS), found["plain"]),
            (vectors([PROMPT + text for text in TEXTS]), found["query"]),  # a stored prompt is the client's to add
            (vectors(TEXTS, dimensions=8), found["short"]),
        ):
            assert [pytest.approx(its, abs=TOLERANCE) for its in expected] == vector


def score(source: str, target: str, instruction: str, query: str, documents: list[str]) -> list[float]:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    body = Transformer(source, transformer_task="text-generation")
    yes, no = body.tokenizer.convert_tokens_to_ids(["b", "a"])
    prompts = {"prompts": {"q": instruction}, "default_prompt_name": "q"} if instruction else {}
    CrossEncoder(modules=[body, LogitScore(yes, no)], device="cpu", **prompts).save(target)
    model = CrossEncoder(target, device="cpu")
    return [float(its) for its in model.predict([(query, text) for text in documents])]


@pytest.mark.parametrize("instruction", ["", "Find what purrs"])
def test_scores_of_a_reranker_are_its_own(
    client: Environment, padded_model: Path, tmp_path: Path, instruction: str
) -> None:
    source = shutil.copytree(padded_model, tmp_path / "source")
    (source / "chat_template.jinja").write_text(RERANKER)
    expected = client.call(score, str(source), str(tmp_path / "model"), instruction, "a cat", TEXTS)

    assert json.loads((tmp_path / "model" / "modules.json").read_text())[1]["type"].endswith("LogitScore")
    with served("--model", str(tmp_path / "model"), "--task", "score", "--dtype", "float32") as url:
        scores = [its["score"] for its in post(url, "score", text_1="a cat", text_2=TEXTS)["data"]]
    assert scores == pytest.approx(expected, abs=TOLERANCE)
    assert max(scores) - min(scores) > 100 * TOLERANCE
