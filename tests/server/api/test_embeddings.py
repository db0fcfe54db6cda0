"""POST /v1/embeddings over a FakeEngineClient: vectors, inputs, refusals, limits."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from gptserve.engine.info import EngineInfo
from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.weights.pooling import TextVector
from tests.server.conftest import Api, LiveServer
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient, embed

MakeApi = Callable[..., Api]
Serve = Callable[..., LiveServer]

EMBEDS = replace(INFO, task="embed", vector_size=3)
VECTOR = (0.0, 3.0, 4.0)
RAW = TextVector("mean", normalizes=False)


def engine(info: EngineInfo = EMBEDS, **options: Any) -> FakeEngineClient:
    return FakeEngineClient(embed(VECTOR), info=info, **options)


def make(make_api: MakeApi, fake: FakeEngineClient | None = None, **options: Any) -> Api:
    return make_api(fake or engine(), ByteTokenizer(begin=(2,)), task="embed", **options)


def post(api: Api, given: Any, **body: Any) -> httpx.Response:
    headers = body.pop("headers", None)
    return api.request("POST", "/v1/embeddings", json={"input": given, **body}, headers=headers)


def embeddings(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [(its["object"], its["index"]) for its in data] == [("embedding", i) for i in range(len(data))]
    return [its["embedding"] for its in data]


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str | None, str]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["message"], error["param"], error["code"]


def test_an_answer_has_openais_shape(make_api: MakeApi) -> None:
    response = post(make(make_api, text_vector=RAW), "ab", model="test-model", user="u")
    assert response.json() == {
        "object": "list",
        "model": "test-model",
        "data": [{"object": "embedding", "index": 0, "embedding": [2.0, 3.0, 4.0]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [(2, 97, 98)]),
        (["a", "b"], [(2, 97), (2, 98)]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_inputs_are_texts_or_tokens(make_api: MakeApi, given: Any, prompts: list[tuple[int, ...]]) -> None:
    fake = engine()
    api = make(make_api, fake, text_vector=RAW)
    assert embeddings(post(api, given)) == [[ids[0], 3.0, 4.0] for ids in prompts]
    assert [(its.prompt_token_ids, its.pooling) for its in fake.submitted] == [(ids, "mean") for ids in prompts]


def test_texts_may_go_without_the_tokens_that_a_prompt_begins_with(make_api: MakeApi) -> None:
    fake = engine()
    post(make(make_api, fake), "a", add_special_tokens=False)
    assert fake.submitted[0].prompt_token_ids == (97,)


@pytest.mark.parametrize(
    ("given", "asked", "prompt"),
    [
        ("abcd", {}, (2, 97, 98, 99, 100, 3, 4)),
        ("abcd", {"truncate_prompt_tokens": 7}, (2, 97, 98, 99, 100, 3, 4)),
        ("abcd", {"truncate_prompt_tokens": 5}, (2, 97, 98, 3, 4)),
        ("a" * 9999, {"truncate_prompt_tokens": -1}, (2, *b"a" * 253, 3, 4)),
        ("abcd", {"truncate_prompt_tokens": 1, "add_special_tokens": False}, (97,)),
        ([5, 6, 7], {"truncate_prompt_tokens": 2}, (5, 6)),
    ],
)
def test_the_end_of_a_text_is_cut_between_its_special_tokens(
    make_api: MakeApi, given: Any, asked: dict[str, Any], prompt: tuple[int, ...]
) -> None:
    fake = engine()
    api = make_api(fake, ByteTokenizer(begin=(2,), end=(3, 4)), task="embed")
    assert post(api, given, **asked).json()["usage"]["prompt_tokens"] == len(prompt)
    assert fake.submitted[0].prompt_token_ids == prompt


def test_a_text_needs_room_between_its_special_tokens(make_api: MakeApi) -> None:
    api = make_api(engine(), ByteTokenizer(begin=(2,), end=(3, 4)), task="embed")
    message = "truncate_prompt_tokens must be above 3, the tokens around the text, got 3"
    expected = message, "truncate_prompt_tokens", "invalid_value"
    assert refusal(post(api, "abc", truncate_prompt_tokens=3)) == expected


def test_vectors_come_in_the_order_of_the_inputs(make_api: MakeApi) -> None:
    def backwards(request: Any) -> Any:
        for _ in range(9 - request.prompt_token_ids[0]):
            yield TokenOutput("gone", ())
        yield from embed(VECTOR)(request)

    api = make(make_api, FakeEngineClient(backwards, info=EMBEDS), text_vector=RAW)
    assert [its[0] for its in embeddings(post(api, [[1], [2], [3]]))] == [1.0, 2.0, 3.0]


def test_a_vector_has_the_length_1_where_the_folder_says_so(make_api: MakeApi) -> None:
    (vector,) = embeddings(post(make(make_api), [[0]]))
    assert vector == pytest.approx([0.0, 0.6, 0.8], abs=1e-7)


@pytest.mark.parametrize(("normalizes", "expected"), [(True, [0.0, 1.0]), (False, [0.0, 3.0])])
def test_dimensions_cut_a_vector_which_is_normalised_again(
    make_api: MakeApi, *, normalizes: bool, expected: list[float]
) -> None:
    api = make(make_api, text_vector=TextVector("last", normalizes=normalizes))
    assert embeddings(post(api, [[0]], dimensions=2)) == [expected]


def test_a_vector_of_zeros_stays_one(make_api: MakeApi) -> None:
    api = make(make_api, FakeEngineClient(embed([0.0, 0.0]), info=replace(EMBEDS, vector_size=2)))
    assert embeddings(post(api, [[0]])) == [[0.0, 0.0]]


def test_base64_holds_the_same_numbers_in_fp32(make_api: MakeApi) -> None:
    api = make(make_api)
    (text,), (numbers,) = (embeddings(post(api, "a", encoding_format=kind)) for kind in ("base64", "float"))
    assert list(struct.unpack("<3f", base64.b64decode(text))) == numbers


@pytest.mark.parametrize(
    ("body", "message", "param", "code"),
    [
        ({"input": ""}, "input must hold a text or a token, got an empty one", "input", "invalid_value"),
        ({"input": []}, "input must hold a text or a token, got an empty one", "input", "invalid_value"),
        ({"input": [[]]}, "input must hold at least one token, got an empty one", "input", "invalid_value"),
        (
            {"input": [[1], []]},
            "input 1: input must hold at least one token, got an empty one",
            "input",
            "invalid_value",
        ),
        ({"input": [257]}, "input: token ids must be in [0, 257), got 257", "input", "invalid_value"),
        ({"input": [-1]}, "input: token ids must be in [0, 257), got -1", "input", "invalid_value"),
        (
            {"input": [1] * 257},
            "The input is too long. This model's maximum context length is 256 tokens; the input has 257",
            "input",
            "context_length_exceeded",
        ),
        (
            {"input": "a" * 4000},
            "The input is too long. This model's maximum context length is 256 tokens, which no more than 3328 bytes "
            "can fit; an input has 4000",
            "input",
            "context_length_exceeded",
        ),
        (
            {"input": "a", "dimensions": 4},
            "dimensions must be at most 3, the width of this model, got 4",
            "dimensions",
            "invalid_value",
        ),
        (
            {"input": "a", "truncate_prompt_tokens": 257},
            "truncate_prompt_tokens must be -1 or in [1, 256], got 257",
            "truncate_prompt_tokens",
            "invalid_value",
        ),
        (
            {"input": "a", "model": "x"},
            "model 'x' does not exist; this server has 'test-model'",
            "model",
            "model_not_found",
        ),
    ],
)
def test_a_bad_request_is_refused_in_words(
    make_api: MakeApi, body: dict[str, Any], message: str, param: str, code: str
) -> None:
    fake = engine()
    response = make(make_api, fake).request("POST", "/v1/embeddings", json=body)
    assert refusal(response, 404 if code == "model_not_found" else 400) == (message, param, code)
    assert fake.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["a", 7]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "timeout_ms": 0}, "timeout_ms"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(make_api: MakeApi, body: dict[str, Any], param: str) -> None:
    response = make(make_api).request("POST", "/v1/embeddings", json=body)
    assert refusal(response)[1] == param


def test_a_list_may_be_longer_than_the_queue(make_api: MakeApi) -> None:
    fake = engine(replace(EMBEDS, max_num_seqs=2, max_num_queued_reqs=1))
    inputs = [[i] for i in range(10)]
    assert [its[0] for its in embeddings(post(make(make_api, fake, text_vector=RAW), inputs))] == list(range(10))
    assert [request.prompt_token_ids for request in fake.submitted] == [(i,) for i in range(10)]


@pytest.mark.parametrize(("encoding", "width", "limit"), [("float", 4096, 2**21), ("base64", 16384, 2**23)])
def test_an_answer_has_a_greatest_size(make_api: MakeApi, encoding: str, width: int, limit: int) -> None:
    fake = engine(replace(EMBEDS, vector_size=width))
    message, param, _ = refusal(post(make(make_api, fake), ["a"] * 600, encoding_format=encoding))
    rule = f"the number of inputs times that of dimensions may be at most {limit} in {encoding}, got 600 times {width}"
    assert (message, param, fake.submitted) == (rule, "input", [])
    assert len(embeddings(post(make(make_api, fake), ["a"] * 600, dimensions=2, encoding_format=encoding))) == 600


def test_a_key_has_its_limits(make_api: MakeApi) -> None:
    options = {"api_keys": ("k",), "max_requests_per_key": 4, "max_tokens_per_minute_per_key": 8}
    api, headers = make(make_api, engine(), **options), {"authorization": "Bearer k"}
    assert post(api, "a").status_code == 401
    assert len(embeddings(post(api, ["a"] * 5, headers=headers))) == 5, "four of them at once"
    assert "tokens a minute" in refusal(post(api, "a", headers=headers), 429)[0]


def test_a_failure_of_the_engine_is_told(make_api: MakeApi) -> None:
    def fails(request: Any) -> Any:
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="not finite")

    response = post(make(make_api, FakeEngineClient(fails, info=EMBEDS)), ["a", "b"])
    assert refusal(response, 500) == ("input 0: not finite", None, "generation_failed")


def test_inputs_are_counted_in_the_metrics(make_api: MakeApi) -> None:
    api = make(make_api)
    post(api, ["ab", "c"])
    metrics = api.get("/metrics").text
    assert 'gptserve_request_success_total{finished_reason="stop",model_name="test-model"} 2.0' in metrics
    assert 'gptserve_request_prompt_tokens_sum{model_name="test-model"} 5.0' in metrics
    assert 'gptserve_request_queue_time_seconds_count{model_name="test-model"} 2.0' in metrics


def test_a_client_that_hangs_up_is_computed_for_no_more(serve: Serve) -> None:
    server = serve(engine(auto=False), task="embed")
    with httpx.Client(timeout=20) as client:
        request = client.build_request("POST", f"{server.url}/v1/embeddings", json={"input": ["a", "b"]})
        request.extensions["timeout"]["read"] = 0.1
        with pytest.raises(httpx.ReadTimeout):
            client.send(request)
    server.engine.wait_for(lambda: len(server.engine.aborted) == 2)
    server.wait_until_idle()


def test_a_client_that_hangs_up_between_two_parts_of_its_list_has_no_other_computed(serve: Serve) -> None:
    server = serve(engine(replace(EMBEDS, max_num_seqs=1, max_num_queued_reqs=0), auto=False), task="embed")
    with httpx.Client(timeout=20) as client:
        request = client.build_request("POST", f"{server.url}/v1/embeddings", json={"input": ["a", "b", "c"]})
        request.extensions["timeout"]["read"] = 0.5
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(client.send, request)
            server.engine.wait_for(lambda: len(server.engine.submitted) == 1)
            server.engine.from_outside(server.engine.step)
            server.engine.wait_for(lambda: len(server.engine.submitted) == 2)
            with pytest.raises(httpx.ReadTimeout):
                answer.result()
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
    server.wait_until_idle()
    assert len(server.engine.submitted) == 2


def test_a_request_ends_at_its_own_time_limit(serve: Serve) -> None:
    server = serve(engine(auto=False), task="embed")
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a", "timeout_ms": 50}, timeout=20)
    message = "timeout_ms: the inputs were not computed within 50 ms"
    assert refusal(response, 503) == (message, "timeout_ms", "queue_timeout")


def test_the_openai_client_reads_the_vectors(serve: Serve) -> None:
    server = serve(engine(), task="embed", text_vector=RAW)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        answer = client.embeddings.create(model="test-model", input=["a", "b"])  # it asks for base64, and decodes it
        assert [its.embedding for its in answer.data] == [[97.0, 3.0, 4.0], [98.0, 3.0, 4.0]]
        answer = client.embeddings.create(model="test-model", input=[[1, 2]], dimensions=2, encoding_format="float")
    assert ([its.embedding for its in answer.data], answer.usage.prompt_tokens) == ([[1.0, 3.0]], 2)


GENERATING = ["completions", "chat/completions", "responses", "messages", "messages/count_tokens"]


@pytest.mark.parametrize("route", GENERATING)
def test_a_server_that_embeds_refuses_to_generate(make_api: MakeApi, route: str) -> None:
    response = make(make_api).request("POST", f"/v1/{route}", json={"prompt": "a"})
    message = f"/v1/{route} needs a server with --task generate; this one was started with --task embed"
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def test_a_server_that_generates_refuses_to_embed(make_api: MakeApi) -> None:
    response = post(make_api(FakeEngineClient()), "a")
    message = "/v1/embeddings needs a server with --task embed; this one was started with --task generate"
    assert refusal(response) == (message, None, "unsupported_task")


@pytest.mark.slow
def test_the_document_describes_the_routes_of_the_task(make_api: MakeApi) -> None:
    paths = make(make_api).get("/openapi.json").json()["paths"]
    assert "/v1/embeddings" in paths
    assert "/v1/completions" not in paths
    assert "/v1/embeddings" not in make_api(FakeEngineClient()).get("/openapi.json").json()["paths"]
