"""The JSON shapes of /v1/classify, /v1/score and the routes of rerank: vLLM's, Jina's and Cohere's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gptserve.server.schemas.base import Text, _Model, _RequestModel, _text_or_list
from gptserve.server.schemas.embeddings import MAX_INPUTS, EmbeddingUsage, InputRequest, PooledRequest

TEXTS_RULE = "Input should be a string or a list of strings"
DOCUMENT_RULE = "Input should be a string or an object with a text"


def _cut(given: Any) -> Any:
    """Cut a list of too many texts to one over the limit: pydantic would check each of a million."""
    return given[: MAX_INPUTS + 1] if isinstance(given, list) else given


def _document_kind(value: Any) -> str | None:
    return "[text]" if isinstance(value, str) else "[document]" if isinstance(value, dict) else None


Texts = Annotated[
    Text | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("list")],
    Discriminator(_text_or_list, custom_error_type="texts_type", custom_error_message=TEXTS_RULE),
    BeforeValidator(_cut),
]


class DocumentObject(_RequestModel):
    """A document as Jina's clients may send it."""

    text: str


Document = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[DocumentObject, Tag("[document]")],
    Discriminator(_document_kind, custom_error_type="document_type", custom_error_message=DOCUMENT_RULE),
]


class _Activated(PooledRequest):
    use_activation: bool | None = None
    """false: logits in the place of probabilities; default true"""


class ClassifyRequest(_Activated, InputRequest):
    """The body of POST /v1/classify."""


class _Scored(_Activated):
    instruction: str | None = None
    """what to look for, in the place of the model's own instruction"""


class ScoreRequest(_Scored):
    """The body of POST /v1/score."""

    text_1: Texts
    """a query, or a list of queries as long as that of text_2"""
    text_2: Texts
    """a document, or a list of documents"""


class RerankRequest(_Scored):
    """The body of POST /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[
        list[Document], Field(max_length=MAX_INPUTS, fail_fast=True, min_length=1), BeforeValidator(_cut)
    ]
    """texts, or objects with a text"""
    top_n: Annotated[int, Field(ge=0)] | None = None
    """how many of the best to return; default 0, all"""
    return_documents: bool | None = None
    """put the documents into the results; default true, and false at /v2/rerank"""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """a document is cut after so many tokens; default none"""


class ClassifiedText(_Model):
    """The labels' numbers of one input."""

    index: int
    label: str
    """the likeliest"""
    probs: list[float]
    """of each label, in the order of the model's id2label"""
    num_classes: int


class _Answer(_Model):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: EmbeddingUsage


class ClassifyList(_Answer):
    """The answer of POST /v1/classify."""

    data: list[ClassifiedText]


class Score(_Model):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(_Answer):
    """The answer of POST /v1/score."""

    data: list[Score]


class RankedDocument(_Model):
    """A document and its place in the request."""

    index: int
    relevance_score: float
    document: dict[Literal["text"], str] | None = None


class Ranking(_Model):
    """The answer of POST /v1/rerank and /v2/rerank, the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
    meta: dict[str, Any] | None = None
    """at /v2/rerank"""
