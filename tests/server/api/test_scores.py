"""POST /v1/classify, /v1/score and the routes of rerank over a FakeEngineClient: numbers, prompts, refusals, limits."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.completions.pairs import DOCUMENT, INSTRUCTION, QUERY, Form, PairPrompt
from gptserve.weights.classes import TextClasses
from tests.server.conftest import Api
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient

MakeApi = Callable[..., Api]

LABELS = TextClasses(("bad", "good", "odd"), "softmax", pad_token_id=0)
ONE_LABEL = TextClasses(("LABEL_0",), "sigmoid")
NO_YES = TextClasses(("no", "yes"), "softmax", (7, 11))
PROMPT = PairPrompt(Form(((2,), (QUERY, ":", DOCUMENT), (3,))), Form(((2,), (INSTRUCTION, QUERY, ":", DOCUMENT), (3,))))
SIGMOID = {number: 1 / (1 + math.exp(-number)) for number in (-1.0, 0.0, 1.0, 2.0)}


def logits(of_prompt: Callable[[Sequence[int]], Sequence[float]]) -> FakeEngineClient:
    def reply(request: Any) -> Iterator[TokenOutput]:
        vector = array("f", of_prompt(request.prompt_token_ids))
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.STOP, waits=(0.1, 0.2), vector=vector)

    return FakeEngineClient(reply, info=replace(INFO, task="score"))


def of_digit(prompt: Sequence[int]) -> tuple[float, ...]:
    """Logits of no and yes whose difference is the digit that the document ends with, less 1."""
    return (1.0, float(prompt[-2] - ord("0")))


def classify(make_api: MakeApi, fake: FakeEngineClient, classes: TextClasses = LABELS, **options: Any) -> Api:
    tokenizer = ByteTokenizer(begin=(2,))
    return make_api(fake, tokenizer, task="classify", text_classes=classes, pair_prompt=PROMPT, **options)


def score(make_api: MakeApi, fake: FakeEngineClient | None = None, **options: Any) -> Api:
    fake = fake or logits(of_digit)
    return make_api(fake, ByteTokenizer(), task="score", text_classes=NO_YES, pair_prompt=PROMPT, **options)


def post(api: Api, route: str, **body: Any) -> dict[str, Any]:
    response = api.request("POST", route, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str | None, str]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["message"], error["param"], error["code"]


def scores(answer: dict[str, Any]) -> list[float]:
    assert [(its["index"], its["object"]) for its in answer["data"]] == [
        (i, "score") for i in range(len(answer["data"]))
    ]
    return [its["score"] for its in answer["data"]]


@pytest.mark.parametrize("route", ["/v1/classify", "/classify"])
def test_classes_have_vllms_shape(make_api: MakeApi, route: str) -> None:
    fake = logits(lambda prompt: (0.0, float(len(prompt)), 1.0))
    answer = post(classify(make_api, fake), route, input=["a", "b"], model="test-model", user="u")
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 0
    powers = [1.0, math.exp(2), math.exp(1)]
    probs = [pytest.approx(power / sum(powers), abs=1e-15) for power in powers]
    data = [{"index": i, "label": "good", "probs": probs, "num_classes": 3} for i in range(2)]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    assert answer == {"object": "list", "model": "test-model", "data": data, "usage": usage}
    assert [(its.prompt_token_ids, its.pooling) for its in fake.submitted] == [((2, 97), "last"), ((2, 98), "last")]


@pytest.mark.parametrize(
    ("activation", "asked", "expected"),
    [
        ("sigmoid", {}, [SIGMOID[0.0], SIGMOID[1.0], SIGMOID[-1.0]]),
        ("none", {}, [0.0, 1.0, -1.0]),
        ("softmax", {"use_activation": False}, [0.0, 1.0, -1.0]),
    ],
)
def test_probabilities_are_as_the_folder_says(
    make_api: MakeApi, activation: Any, asked: dict[str, Any], expected: list[float]
) -> None:
    api = classify(make_api, logits(lambda _: (0.0, 1.0, -1.0)), replace(LABELS, activation=activation))
    (found,) = post(api, "/v1/classify", input="a", **asked)["data"]
    assert found["probs"] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("given", "asked", "prompt"),
    [
        ([5, 6, 0, 0], {}, (5, 6)),
        ([0, 0], {}, (0,)),
        ([0, 5], {}, (0, 5)),
        ("abc", {"truncate_prompt_tokens": 2}, (2, 97)),
        ("abc", {"truncate_prompt_tokens": -1}, (2, 97, 98, 99)),
        ("abc", {"add_special_tokens": False}, (97, 98, 99)),
    ],
)
def test_a_text_ends_before_padding_and_where_it_is_cut(
    make_api: MakeApi, given: Any, asked: dict[str, Any], prompt: tuple[int, ...]
) -> None:
    fake = logits(lambda _: (0.0, 1.0, -1.0))
    answer = post(classify(make_api, fake), "/v1/classify", input=given, **asked)
    assert fake.submitted[0].prompt_token_ids == prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("route", ["/v1/score", "/score"])
def test_scores_have_vllms_shape(make_api: MakeApi, route: str) -> None:
    fake = logits(of_digit)
    answer = post(score(make_api, fake), route, text_1="q", text_2=["d0", "d2"])
    assert answer.pop("id").startswith("score-")
    assert answer.pop("created") > 0
    data = [{"index": i, "object": "score", "score": SIGMOID[its]} for i, its in enumerate((-1.0, 1.0))]
    usage = {"prompt_tokens": 12, "total_tokens": 12}
    assert answer == {"object": "list", "model": "test-model", "data": data, "usage": usage}
    assert [its.prompt_token_ids for its in fake.submitted] == [(2, *f"q:{d}".encode(), 3) for d in ("d0", "d2")]


@pytest.mark.parametrize(
    ("text_1", "text_2", "pairs"),
    [
        ("q", "1", ["q:1"]),
        (["q"], ["1", "2"], ["q:1", "q:2"]),
        (["q", "r"], ["1", "2"], ["q:1", "r:2"]),
    ],
)
def test_pairs_are_one_with_each_or_each_with_its_own(
    make_api: MakeApi, text_1: Any, text_2: Any, pairs: list[str]
) -> None:
    fake = logits(of_digit)
    assert len(scores(post(score(make_api, fake), "/score", text_1=text_1, text_2=text_2))) == len(pairs)
    assert [bytes(its.prompt_token_ids[1:-1]).decode() for its in fake.submitted] == pairs


def test_a_score_is_that_of_one_label_or_of_yes(make_api: MakeApi) -> None:
    one = classify(make_api, logits(lambda _: (2.0,)), ONE_LABEL)
    assert scores(post(one, "/score", text_1="q", text_2="d")) == [SIGMOID[2.0]]
    assert scores(post(one, "/score", text_1="q", text_2="d", use_activation=False)) == [2.0]
    raw = classify(make_api, logits(lambda _: (2.0,)), replace(ONE_LABEL, activation="none"))
    assert scores(post(raw, "/score", text_1="q", text_2="d")) == [2.0]
    of_tokens = score(make_api, logits(lambda _: (1.0, 3.0)))
    assert scores(post(of_tokens, "/score", text_1="q", text_2="d", use_activation=False)) == [2.0]
    assert scores(post(of_tokens, "/score", text_1="q", text_2="d")) == [
        pytest.approx(math.exp(3) / (math.e + math.exp(3)))
    ]


def test_an_instruction_takes_its_place_in_the_prompt(make_api: MakeApi) -> None:
    fake = logits(of_digit)
    post(score(make_api, fake), "/score", text_1="q", text_2="1", instruction="i")
    assert fake.submitted[0].prompt_token_ids == (2, *b"iq:1", 3)


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank"])
def test_a_ranking_has_jinas_shape(make_api: MakeApi, route: str) -> None:
    answer = post(score(make_api), route, query="q", documents=["d0", {"text": "d2"}, "d1"], model="test-model")
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "model": "test-model",
        "results": [
            {"index": 1, "relevance_score": SIGMOID[1.0], "document": {"text": "d2"}},
            {"index": 2, "relevance_score": SIGMOID[0.0], "document": {"text": "d1"}},
            {"index": 0, "relevance_score": SIGMOID[-1.0], "document": {"text": "d0"}},
        ],
        "usage": {"prompt_tokens": 18, "total_tokens": 18},
    }


def test_the_ranking_of_v2_has_coheres_shape(make_api: MakeApi) -> None:
    answer = post(score(make_api), "/v2/rerank", query="q", documents=["d0", "d2"], model="test-model", top_n=1)
    assert answer["results"] == [{"index": 1, "relevance_score": SIGMOID[1.0]}]
    assert answer["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": 12}}
    shown = post(score(make_api), "/v2/rerank", query="q", documents=["d0"], return_documents=True)
    assert shown["results"][0]["document"] == {"text": "d0"}


@pytest.mark.parametrize(
    ("asked", "order"),
    [({}, [1, 3, 0, 2]), ({"top_n": 3}, [1, 3, 0]), ({"top_n": 0}, [1, 3, 0, 2]), ({"top_n": 9}, [1, 3, 0, 2])],
)
def test_equal_documents_stay_in_their_order(make_api: MakeApi, asked: dict[str, Any], order: list[int]) -> None:
    body = {"query": "q", "documents": ["a1", "b2", "c1", "d2"], "return_documents": False}
    assert post(score(make_api), "/rerank", **body, **asked)["results"] == [
        {"index": i, "relevance_score": SIGMOID[i % 2 * 1.0]} for i in order
    ]


def test_documents_are_cut_by_their_tokens(make_api: MakeApi) -> None:
    fake = logits(of_digit)
    answer = post(score(make_api, fake), "/v2/rerank", query="q", documents=["12é", "1é"], max_tokens_per_doc=2)
    assert [bytes(its.prompt_token_ids[1:-1]) for its in fake.submitted] == [b"q:12", b"q:1"]
    assert answer["usage"]["prompt_tokens"] == 11
    shown = post(score(make_api), "/rerank", query="q", documents=["123"], max_tokens_per_doc=2)
    assert shown["results"][0]["document"] == {"text": "123"}, "as it was sent"


def test_a_pair_is_cut_at_its_end(make_api: MakeApi) -> None:
    fake = logits(of_digit)
    post(score(make_api, fake), "/score", text_1="q", text_2="1" * 5000, truncate_prompt_tokens=6)
    post(score(make_api, fake), "/score", text_1="q", text_2="1" * 5000, truncate_prompt_tokens=-1)
    assert [its.prompt_token_ids for its in fake.submitted] == [(2, *b"q:11", 3), (2, *b"q:" + b"1" * 252, 3)]


TOO_LONG = "The pair is too long. This model's maximum context length is 256 tokens"


@pytest.mark.parametrize(
    ("route", "body", "message", "param", "code"),
    [
        (
            "score",
            {"text_1": [], "text_2": "d"},
            "text_1 must hold at least one text, got an empty list",
            "text_1",
            None,
        ),
        (
            "score",
            {"text_1": "q", "text_2": []},
            "text_2 must hold at least one text, got an empty list",
            "text_2",
            None,
        ),
        (
            "score",
            {"text_1": ["q", "r"], "text_2": ["1", "2", "3"]},
            "text_1 must hold one text, or as many as text_2, got 2 and 3",
            "text_1",
            None,
        ),
        (
            "score",
            {"text_1": "q", "text_2": ["1", "2" * 3400]},
            f"{TOO_LONG}, which no more than 3328 bytes can fit; pair 1 has 3401",
            "text_2",
            "context_length_exceeded",
        ),
        (
            "rerank",
            {"query": "q", "documents": ["1", "2" * 300]},
            "pair 1: The input is too long. This model's maximum context length is 256 tokens; the input has 304",
            "documents",
            "context_length_exceeded",
        ),
        (
            "score",
            {"text_1": "q", "text_2": "1", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens must be -1 or in [1, 256], got 0",
            "truncate_prompt_tokens",
            None,
        ),
        (
            "score",
            {"text_1": "q", "text_2": "1", "truncate_prompt_tokens": 257},
            "truncate_prompt_tokens must be -1 or in [1, 256], got 257",
            "truncate_prompt_tokens",
            None,
        ),
        (
            "score",
            {"text_1": "q", "text_2": "1", "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens must be above 2, the tokens around the texts, got 2",
            "truncate_prompt_tokens",
            None,
        ),
        (
            "rerank",
            {"query": "q", "documents": ["1"], "model": "x"},
            "model 'x' does not exist; this server has 'test-model'",
            "model",
            "model_not_found",
        ),
    ],
)
def test_a_bad_request_is_refused_in_words(
    make_api: MakeApi, route: str, body: dict[str, Any], message: str, param: str, code: str | None
) -> None:
    fake = logits(of_digit)
    response = score(make_api, fake).request("POST", f"/v1/{route}", json=body)
    found = refusal(response, 404 if code == "model_not_found" else 400)
    assert found == (message, param, code or "invalid_value")
    assert fake.submitted == []


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("score", {"text_1": "q"}, "text_2"),
        ("score", {"text_1": 7, "text_2": "d"}, "text_1"),
        ("score", {"text_1": "q", "text_2": [["a"]]}, "text_2"),
        ("score", {"text_1": "q", "text_2": ["a"] * 2049}, "text_2"),
        ("rerank", {"query": "q"}, "documents"),
        ("rerank", {"query": "q", "documents": []}, "documents"),
        ("rerank", {"query": ["q"], "documents": ["d"]}, "query"),
        ("rerank", {"query": "q", "documents": "d"}, "documents"),
        ("rerank", {"query": "q", "documents": ["d"] * 2049}, "documents"),
        ("rerank", {"query": "q", "documents": [7]}, "documents"),
        ("rerank", {"query": "q", "documents": [{"title": "d"}]}, "documents[0].text"),
        ("rerank", {"query": "q", "documents": [{"text": "d", "title": "t"}]}, "documents[0].title"),
        ("rerank", {"query": "q", "documents": ["d"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "q", "documents": ["d"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(make_api: MakeApi, route: str, body: dict[str, Any], param: str) -> None:
    assert refusal(score(make_api).request("POST", f"/v1/{route}", json=body))[1] == param


def test_pairs_have_a_greatest_size_together(make_api: MakeApi) -> None:
    fake = logits(of_digit)
    body = {"query": "q" * 100, "documents": ["1"] * 12}
    message, param, _ = refusal(score(make_api, fake, max_body_bytes=1024).request("POST", "/rerank", json=body))
    assert message == "all pairs of query and documents may have at most 1024 bytes together, got 1212"
    assert (param, fake.submitted) == ("documents", [])


def test_a_list_may_be_longer_than_the_queue(make_api: MakeApi) -> None:
    fake = logits(of_digit)
    fake.info = replace(fake.info, max_num_seqs=2, max_num_queued_reqs=1)
    fake.max_requests = 3
    found = scores(post(score(make_api, fake), "/score", text_1="q", text_2=[str(i % 3) for i in range(10)]))
    assert found == [SIGMOID[i % 3 - 1.0] for i in range(10)]


def test_a_failure_of_the_engine_names_the_document(make_api: MakeApi) -> None:
    def fails(request: Any) -> Any:
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="not finite")

    api = score(make_api, FakeEngineClient(fails, info=replace(INFO, task="score")))
    response = api.request("POST", "/rerank", json={"query": "q", "documents": ["a"]})
    assert refusal(response, 500) == ("document 0: not finite", None, "generation_failed")


def test_scores_need_one_label(make_api: MakeApi) -> None:
    api = classify(make_api, logits(lambda _: (0.0, 1.0, -1.0)))
    message = "scores of pairs need a model of one label; this one has 3, for POST /v1/classify"
    for route, body in (("score", {"text_1": "q", "text_2": "d"}), ("rerank", {"query": "q", "documents": ["d"]})):
        assert refusal(api.request("POST", f"/v1/{route}", json=body)) == (message, None, "unsupported_task")


@pytest.mark.parametrize(
    ("route", "needed"),
    [
        ("/v1/completions", "generate"),
        ("/v1/embeddings", "embed"),
        ("/v1/classify", "classify"),
        ("/classify", "classify"),
    ],
)
def test_a_server_that_scores_refuses_other_tasks(make_api: MakeApi, route: str, needed: str) -> None:
    message = f"{route} needs a server with --task {needed}; this one was started with --task score"
    assert refusal(score(make_api).request("POST", route, json={})) == (message, None, "unsupported_task")


@pytest.mark.parametrize("route", ["/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"])
def test_a_server_that_generates_refuses_to_score(make_api: MakeApi, route: str) -> None:
    message = f"{route} needs a server with --task score; this one was started with --task generate"
    assert refusal(make_api(FakeEngineClient()).request("POST", route, json={})) == (message, None, "unsupported_task")
