"""From a parsed request for labels or scores to a plan, and from logits to its answer. Knows no HTTP."""

from __future__ import annotations

import math
import time
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from gptserve.engine.errors import InvalidRequestError
from gptserve.engine.request import too_long
from gptserve.server.completions.admission import take_inputs
from gptserve.server.completions.model import Model
from gptserve.server.completions.prompt import blaming
from gptserve.server.completions.service import Service
from gptserve.server.core.errors import ServiceError
from gptserve.server.core.tokenizer import Tokenizer
from gptserve.server.embeddings.plan import encode_inputs, inputs_of, num_kept, pooling_requests
from gptserve.server.embeddings.run import PooledPlan, check_requests
from gptserve.server.schemas.scores import ClassifyRequest, DocumentObject, RerankRequest, ScoreRequest
from gptserve.weights.classes import LabelActivation, TextClasses

Api = Literal["v1", "v2"]
"""v1 is Jina's rerank, v2 is Cohere's."""
PairBody = ScoreRequest | RerankRequest


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The pairs of a request. The names are those of the fields that have them."""

    queries: Sequence[str]
    documents: Sequence[str]
    query_field: str
    document_field: str


async def plan_classes(body: ClassifyRequest, service: Service, owner: str | None) -> PooledPlan:
    """Check and tokenize. Raises ServiceError, QueueFullError or InvalidRequestError."""
    service = service.naming(body.model)
    model, inputs = service.model, inputs_of(body.input)
    most = num_kept(body.truncate_prompt_tokens, model)
    num_at_once = take_inputs(service, owner, len(inputs))
    prompts = await encode_inputs(inputs, service, special=body.add_special_tokens is not False, most=most)
    requests = pooling_requests("classify", [_without_pads(ids, model) for ids in prompts], "last", owner)
    check_requests(requests, model)
    return PooledPlan(model, owner, requests, num_at_once, body, partial(_classified, body))


async def plan_scores(body: ScoreRequest, service: Service, owner: str | None) -> PooledPlan:
    """Check and tokenize. Raises what plan_classes does."""
    queries, documents = ([its] if isinstance(its, str) else its for its in (body.text_1, body.text_2))
    if not queries or not documents:
        name = "text_2" if queries else "text_1"
        raise InvalidRequestError(f"{name} must hold at least one text, got an empty list", param=name)
    if len(queries) not in (1, len(documents)):
        rule = "text_1 must hold one text, or as many as text_2"
        raise InvalidRequestError(f"{rule}, got {len(queries)} and {len(documents)}", param="text_1")
    queries = queries * len(documents) if len(queries) == 1 else queries
    return await _plan_pairs(body, _Pairs(queries, documents, "text_1", "text_2"), service, owner, _scored)


async def plan_ranking(api: Api, body: RerankRequest, service: Service, owner: str | None) -> PooledPlan:
    """Check and tokenize. Raises what plan_classes does."""
    documents = [its.text if isinstance(its, DocumentObject) else its for its in body.documents]
    pairs = _Pairs([body.query] * len(documents), documents, "query", "documents")
    if body.max_tokens_per_doc is not None:
        cut = partial(_cut_text, body.max_tokens_per_doc, service.naming(body.model).model.tokenizer)
        with blaming("documents"):
            shown = await service.in_worker(lambda: [cut(its) for its in documents])
        pairs = replace(pairs, documents=shown)
    planned = await _plan_pairs(body, pairs, service, owner, partial(_ranked, api, documents))
    return replace(planned, noun="document")


async def _plan_pairs(
    body: PairBody, pairs: _Pairs, service: Service, owner: str | None, answer: Callable[..., Mapping[str, object]]
) -> PooledPlan:
    service = service.naming(body.model)
    model = service.model
    if (num_labels := len(_classes(model).labels)) > 1 and not _classes(model).token_ids:
        message = f"scores of pairs need a model of one label; this one has {num_labels}, for POST /v1/classify"
        raise ServiceError("unsupported_task", message)
    most = num_kept(body.truncate_prompt_tokens, model)
    _check_sizes(body, pairs, service, is_cut=most is not None)
    num_at_once = take_inputs(service, owner, len(pairs.documents))

    def encode_all() -> list[tuple[int, ...]]:
        return [_encoded(i, pairs, model, body.instruction, most) for i in range(len(pairs.documents))]

    requests = pooling_requests("score", await service.in_worker(encode_all), "last", owner)
    try:
        check_requests(requests, model, "pair")
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param=pairs.document_field, code=error.code) from error
    return PooledPlan(model, owner, requests, num_at_once, body, partial(answer, body), noun="pair")


def _encoded(i: int, pairs: _Pairs, model: Model, instruction: str | None, most: int | None) -> tuple[int, ...]:
    prompt = model.pair_prompt
    assert prompt is not None
    with blaming(pairs.document_field):
        ids = prompt.encode(model.tokenizer, pairs.queries[i], pairs.documents[i], instruction, most)
    return _without_pads(ids, model)


def _check_sizes(body: PairBody, pairs: _Pairs, service: Service, *, is_cut: bool) -> None:
    """Raise InvalidRequestError if the texts of a pair cannot fit the context, or all pairs are too many bytes.

    A query is in each of its pairs, so these may have far more bytes than the body.
    """
    model, total, most = service.model, 0, service.options.settings.max_body_bytes
    limit = model.engine.info.max_model_len
    max_bytes = limit * model.tokenizer.max_token_bytes
    assert model.pair_prompt is not None
    model.pair_prompt.form(body.instruction)
    size_of: dict[str, int] = {}
    around = len((body.instruction or "").encode())
    for i, texts in enumerate(zip(pairs.queries, pairs.documents, strict=True)):
        num_bytes = around
        for text in texts:
            if text not in size_of:
                size_of[text] = len(text.encode())
            num_bytes += size_of[text]
        if num_bytes > max_bytes and not is_cut:
            beyond = f"which no more than {max_bytes} bytes can fit; pair {i} has {num_bytes}"
            message = f"{too_long(limit, 'The pair')}, {beyond}"
            raise InvalidRequestError(message, param=pairs.document_field, code="context_length_exceeded")
        total += num_bytes
    if total > most:
        fields = f"{pairs.query_field} and {pairs.document_field}"
        rule = f"all pairs of {fields} may have at most {most} bytes together"
        raise InvalidRequestError(f"{rule}, got {total}", param=pairs.document_field)


def _without_pads(token_ids: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Return a prompt up to its last token that is no padding: transformers pools there. The first token stays."""
    pad, end = _classes(model).pad_token_id, len(token_ids)
    while end > 1 and token_ids[end - 1] == pad:
        end -= 1
    return token_ids[:end]


def _cut_text(most: int, tokenizer: Tokenizer, text: str) -> str:
    """Return the whole characters of the first tokens of a text."""
    token_ids = tokenizer.encode(text)
    if len(token_ids) <= most:
        return text
    return b"".join(map(tokenizer.token_bytes, token_ids[:most])).decode("utf-8", "ignore")


def activated(logits: Sequence[float], activation: LabelActivation) -> list[float]:
    """Return the probabilities of logits, in fp64: of each alone, or of all together."""
    if activation == "none":
        return list(logits)
    if activation == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    most = max(logits)
    powers = [math.exp(logit - most) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return (power := math.exp(logit)) / (1 + power)


def _classes(model: Model) -> TextClasses:
    assert model.text_classes is not None
    return model.text_classes


def _scores(body: PairBody, vectors: Sequence[array[float]], model: Model) -> list[float]:
    """Return a score of each pair: of two tokens the softmax's second, or without an activation yes minus no."""
    classes = _classes(model)
    margins = [logits[-1] - (logits[0] if len(logits) > 1 else 0.0) for logits in vectors]
    if body.use_activation is False or classes.activation == "none":
        return margins
    return [_sigmoid(margin) for margin in margins]


def _opening(kind: str, plan: PooledPlan) -> dict[str, object]:
    of_list = {"object": "list", "created": int(time.time())}
    return {"id": f"{kind}-{uuid.uuid4().hex}", **of_list, "model": plan.model.name}


def _classified(body: ClassifyRequest, vectors: Sequence[array[float]], plan: PooledPlan) -> Mapping[str, object]:
    classes, data = _classes(plan.model), []
    activation = "none" if body.use_activation is False else classes.activation
    for i, logits in enumerate(vectors):
        label = classes.labels[max(range(len(logits)), key=logits.__getitem__)]
        probs = activated(logits, activation)
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return {**_opening("classify", plan), "data": data, "usage": plan.usage}


def _scored(body: ScoreRequest, vectors: Sequence[array[float]], plan: PooledPlan) -> Mapping[str, object]:
    scores = _scores(body, vectors, plan.model)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return {**_opening("score", plan), "data": data, "usage": plan.usage}


def _ranked(
    api: Api, documents: Sequence[str], body: RerankRequest, vectors: Sequence[array[float]], plan: PooledPlan
) -> Mapping[str, object]:
    """Return the best documents, as they were sent; those of one score in their order."""
    scores = _scores(body, vectors, plan.model)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    shows = api == "v1" if body.return_documents is None else body.return_documents
    results = [
        {"index": i, "relevance_score": scores[i], **({"document": {"text": documents[i]}} if shows else {})}
        for i in order
    ]
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": plan.model.name, "results": results, "usage": plan.usage}
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": plan.num_tokens}}
    return answer if api == "v1" else {**answer, "meta": meta}
