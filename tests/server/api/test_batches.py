"""The routes of batches: OpenAI's client, each way that a batch ends, restarts, two keys against each other."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from gptserve.engine.request import FinishReason, TokenOutput
from gptserve.server.batches import batches as batches_module
from gptserve.server.batches import runner
from gptserve.server.batches.lines import BatchLine, RawLine, line_seed
from tests.server.api.test_embeddings import EMBEDS, RAW, VECTOR
from tests.server.api.test_openai_client import sync_client
from tests.server.conftest import LiveServer
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient, embed

Serve = Callable[..., LiveServer]
ENDED = ("completed", "failed", "expired", "cancelled")
URL = "/v1/completions"


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "x", "max_tokens": 3}}


def begin(client: openai.OpenAI, *lines: Any, url: str = URL, **options: Any) -> Batch:
    data = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    file = client.files.create(file=data.encode(), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **options)  # type: ignore[arg-type]


def end_of(client: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status not in ENDED:
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def refused(call: Callable[[], object]) -> tuple[int, str | None, str | None, str]:
    with pytest.raises(openai.APIStatusError) as raised:
        call()
    error: Any = raised.value.body
    return raised.value.status_code, error["code"], error["param"], error["message"]


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_a_batch_is_answered_line_by_line(serve: Serve) -> None:
    engine = FakeEngineClient()
    with sync_client(serve(engine)) as client:
        lines = [line("a"), line("b", prompt="x", n=2, max_tokens=1, seed=7), line("c", prompt="x", stream=True)]
        begun = begin(client, *lines, "\n", line("d", prompt="x", top_k="1"), metadata={"who": "me"})
        assert (begun.status, begun.object, begun.endpoint, begun.metadata) == (
            "validating",
            "batch",
            URL,
            {"who": "me"},
        )
        assert begun.expires_at == begun.created_at + 24 * 3600
        batch = end_of(client, begun)
        assert (batch.status, counts(batch), batch.errors) == ("completed", (4, 2, 2), None)
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        answers, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert [(one["custom_id"], one["response"]["status_code"]) for one in answers] == [("a", 200), ("b", 200)]
        assert [one["response"]["body"]["seed"] for one in answers] == [line_seed(batch.id, 1), 7]
        assert [choice["text"] for choice in answers[1]["response"]["body"]["choices"]] == ["a", "a"]
        assert [one["response"]["body"]["error"]["message"] for one in errors] == [
            "stream may not be given in a batch",
            "top_k: input should be a valid integer, got '1'",
        ]
        assert [file.filename for file in client.files.list(purpose="batch_output")] == [
            f"{batch.id}_error.jsonl",
            f"{batch.id}_output.jsonl",
        ]
        assert client.batches.cancel(batch.id) == batch, "it has ended"
    assert {request.is_filler for request in engine.submitted} == {True}


def test_chats_and_responses_are_lines_too(serve: Serve) -> None:
    with sync_client(serve(FakeEngineClient())) as client:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        url = "/v1/chat/completions"
        [answer] = results(client, end_of(client, begin(client, line("a", url, **chat), url=url)).output_file_id)
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "ab"
        url = "/v1/responses"
        lines = [
            line("a", url, input="hi", max_output_tokens=2),
            line("b", url, input="hi", store=True),
            line("c", url, input="hi", previous_response_id="resp_1"),
            line("d", url, input=[{"id": "msg_1_in_0", "type": "item_reference"}]),
        ]
        batch = end_of(client, begin(client, *lines, url=url))
        [answer] = results(client, batch.output_file_id)
        body = answer["response"]["body"]
        assert (body["object"], body["store"], body["seed"]) == ("response", False, line_seed(batch.id, 1))
        assert body["output"][0]["content"][0]["text"] == "ab"
        assert [one["response"]["body"]["error"]["message"] for one in results(client, batch.error_file_id)] == [
            "store may not be given in a batch",
            "previous_response_id may not be given in a batch",
            "an item_reference may not be given in a batch",
        ]


def test_embeddings_are_lines_of_a_server_that_has_them(serve: Serve) -> None:
    engine = FakeEngineClient(embed(VECTOR), info=replace(EMBEDS, max_num_seqs=1, max_num_queued_reqs=1))
    server = serve(engine, tokenizer=ByteTokenizer(begin=(2,)), task="embed", text_vector=RAW)
    with sync_client(server) as client:
        url = "/v1/embeddings"
        batch = end_of(client, begin(client, line("a", url, input=["a", "b", "c"]), url=url))
        [answer] = results(client, batch.output_file_id)
        assert [one["embedding"] for one in answer["response"]["body"]["data"]] == [[2.0, 3.0, 4.0]] * 3
        says = "endpoint must be one of /v1/embeddings here, got '/v1/completions'"
        assert refused(lambda: begin(client, line("a"))) == (400, "invalid_value", "endpoint", says)
    assert {request.is_filler for request in engine.submitted} == {True}


def test_a_batch_with_a_bad_line_fails_before_the_first(serve: Serve) -> None:
    engine = FakeEngineClient()
    with sync_client(serve(engine)) as client:
        batch = end_of(client, begin(client, line("a"), "{\n", line("a"), line("b", "/v1/chat/completions")))
        assert (batch.status, counts(batch), batch.output_file_id) == ("failed", (0, 0, 0), None)
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(error.line, error.code) for error in batch.errors.data] == [
            (2, "invalid_json"),
            (3, "invalid_value"),
            (4, "invalid_value"),
        ]
        assert client.files.delete(batch.input_file_id).deleted, "nothing needs it any more"
    assert engine.submitted == []


def test_what_begins_a_batch_is_checked(serve: Serve) -> None:
    with sync_client(serve(FakeEngineClient())) as client:
        assert refused(lambda: begin(client, line("a"), url="/v1/moderations"))[:3] == (
            400,
            "invalid_value",
            "endpoint",
        )
        file = client.files.create(file=b"x", purpose="batch")

        def create(**fields: Any) -> Any:
            body = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h", **fields}
            return refused(lambda: client.post("/batches", body=body, cast_to=object))

        assert create(input_file_id="file-0")[:3] == (404, "file_not_found", "input_file_id")
        assert create(completion_window="1h")[2] == "completion_window"
        assert create(metadata={"k": "v" * 513})[2] == "metadata"
        assert create(output_expires_after={"anchor": "created_at", "seconds": 1})[2] == "output_expires_after"
        assert create(output_expires_after={"anchor": "now", "seconds": 1})[2] == "output_expires_after"
        assert refused(lambda: client.batches.retrieve("batch_0"))[:3] == (404, "batch_not_found", "id")
        done = end_of(client, begin(client, line("a")))
        assert done.output_file_id is not None
        says = f"input_file_id must be of a file with the purpose batch; '{done.output_file_id}' has batch_output"
        assert create(input_file_id=done.output_file_id)[3] == says


def test_batches_are_listed_page_by_page(serve: Serve) -> None:
    with sync_client(serve(FakeEngineClient())) as client:
        made = [end_of(client, begin(client, line("a"))).id for _ in range(3)]
        page = client.batches.list(limit=2)
        assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
        assert [batch.id for batch in client.batches.list(limit=1, after=made[2])] == [made[1], made[0]]


def test_a_cancelled_batch_stops_and_keeps_its_answers(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False, info=replace(INFO, max_num_seqs=2))
    server = serve(engine)
    with sync_client(server) as client:
        begun = begin(client, line("a", prompt="x", max_tokens=1), *(line(str(i)) for i in range(4)))
        engine.wait_for(lambda: len(engine.submitted) == 2)
        in_use = refused(lambda: client.files.delete(begun.input_file_id))
        assert in_use[:3] == (409, "file_in_use", "id")
        engine.from_outside(engine.step)
        engine.wait_for(lambda: len(engine.submitted) == 3)
        while counts(client.batches.retrieve(begun.id)) != (5, 1, 0):
            pass
        assert client.batches.cancel(begun.id).status in ("cancelling", "cancelled")
        batch = end_of(client, begun)
        assert (batch.status, counts(batch), batch.error_file_id) == ("cancelled", (5, 1, 0), None)
        assert None not in (batch.cancelling_at, batch.cancelled_at)
        assert [one["custom_id"] for one in results(client, batch.output_file_id)] == ["a"]
        assert engine.live_ids == []
        assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_whose_time_is_over_names_what_is_missing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "WINDOW_S", 2)
    engine = FakeEngineClient(auto=False, info=replace(INFO, max_num_seqs=2))
    with sync_client(serve(engine)) as client:
        begun = begin(client, line("a", prompt="x", max_tokens=1), line("b"), line("c"))
        engine.wait_for(lambda: len(engine.submitted) == 2)
        engine.from_outside(engine.step)
        batch = end_of(client, begun)
        assert (batch.status, counts(batch)) == ("expired", (3, 1, 2))
        assert [one["custom_id"] for one in results(client, batch.output_file_id)] == ["a"]
        errors = results(client, batch.error_file_id)
        assert [(one["custom_id"], one["error"]["code"], one["response"]) for one in errors] == [
            ("b", "batch_expired", None),
            ("c", "batch_expired", None),
        ]


def test_the_next_server_goes_on_after_the_last_result(serve: Serve, tmp_path: Path) -> None:
    lines = [line(str(i), prompt="x" * (i + 1), max_tokens=3) for i in range(6)]
    engine = FakeEngineClient()
    answer = engine.reply
    engine.reply = lambda request: iter(()) if len(request.prompt_token_ids) > 3 else answer(request)
    with LiveServer(engine, state_dir=tmp_path).running() as first, sync_client(first) as client:
        begun = begin(client, *lines)
        while counts(client.batches.retrieve(begun.id)) != (6, 3, 0):
            pass
    later = FakeEngineClient()
    with sync_client(serve(later, state_dir=tmp_path)) as client:
        batch = end_of(client, begun)
        assert (batch.status, counts(batch)) == ("completed", (6, 6, 0))
        answers = results(client, batch.output_file_id)
        assert [one["custom_id"] for one in answers] == [str(i) for i in range(6)]
        assert [one["response"]["body"]["seed"] for one in answers] == [line_seed(batch.id, n) for n in range(1, 7)]
        assert {one["response"]["body"]["created"] for one in answers} == {batch.created_at}
    assert sorted(len(request.prompt_token_ids) for request in later.submitted) == [4, 5, 6]
    assert [*(tmp_path / "batches").glob("*.results")] == []


def test_what_began_within_a_second_is_listed_in_its_order_after_a_restart_too(serve: Serve, tmp_path: Path) -> None:
    def listed(client: openai.OpenAI) -> list[list[str]]:
        return [[one.id for one in client.batches.list()], [one.id for one in client.files.list(purpose="batch")]]

    with LiveServer(FakeEngineClient(), state_dir=tmp_path).running() as first, sync_client(first) as client:
        begun = [begin(client, line("a")) for _ in range(8)]
        before = listed(client)
        assert before == [[batch.id for batch in begun[::-1]], [batch.input_file_id for batch in begun[::-1]]]
    with sync_client(serve(FakeEngineClient(), state_dir=tmp_path)) as client:
        assert listed(client) == before


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [True, False])
def test_an_input_that_expires_is_kept_for_its_batch_over_a_restart(
    serve: Serve, tmp_path: Path, *, is_there: bool
) -> None:
    with LiveServer(FakeEngineClient(auto=False), state_dir=tmp_path).running() as first, sync_client(first) as client:
        begun = begin(client, line("a"))
        first.engine.wait_for(lambda: len(first.engine.submitted) == 1)
    path = tmp_path / "files" / f"{begun.input_file_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"expires_at": 1}))
    if not is_there:
        path.unlink()
    server = serve(FakeEngineClient(), state_dir=tmp_path)
    with sync_client(server) as client:
        batch = end_of(client, begun)
        if is_there:
            assert (batch.status, counts(batch)) == ("completed", (1, 1, 0))
        else:
            assert (batch.status, batch.errors and batch.errors.data and batch.errors.data[0].code) == (
                "failed",
                "file_not_found",
            )
        assert refused(lambda: client.files.retrieve(begun.input_file_id))[0] == 404, "its time is over"


def test_a_line_that_ends_servers_fails_alone(serve: Serve, tmp_path: Path) -> None:
    lines = [line(name, prompt="x" * num_tokens, max_tokens=3) for num_tokens, name in enumerate("abcd", 1)]
    engine = FakeEngineClient(auto=False)
    with LiveServer(engine, state_dir=tmp_path).running() as first, sync_client(first) as client:
        batches = [begin(client, *lines), begin(client, line("e", prompt="xxxxx", max_tokens=3))]
        engine.wait_for(lambda: len(engine.submitted) == 5)
    paths = [tmp_path / "batches" / f"{batch.id}.results" for batch in batches]
    marks = [f"{n} + \n" for n in range(1, 5)]
    text, end = paths[0].read_text(), "0 - \n"
    assert (sorted(text.removesuffix(end).splitlines(keepends=True)), text[-len(end) :]) == (marks, end), "in order"
    for path, begun in zip(paths, (marks + marks[1:3] + marks[2:3] * 2, marks[:1]), strict=True):
        path.write_text("".join(begun))
    later = FakeEngineClient()
    with sync_client(serve(later, state_dir=tmp_path)) as client:
        (first_end, second_end) = (end_of(client, batch) for batch in batches)
        assert [counts(first_end), counts(second_end)] == [(4, 3, 1), (1, 1, 0)]
        [error] = results(client, first_end.error_file_id)
    says = "4 servers in a row ended while they computed this request"
    assert (error["custom_id"], error["response"]) == ("c", None)
    assert error["error"] == {"code": "generation_failed", "message": says, "line": 3}
    submitted = [len(request.prompt_token_ids) for request in later.submitted]
    assert (submitted[0], sorted(submitted[1:])) == (2, [1, 4, 5]), "the suspect is first"
    assert [request.is_filler for request in later.submitted] == [False, True, True, True], "and waits for nobody"


def test_a_disk_that_is_full_for_a_while_costs_no_line(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    server, failures = serve(FakeEngineClient()), iter(range(5))
    append = server.batch_store._append

    def fail(folder: Path, batch_id: str, data: bytes, **options: bool) -> None:
        if next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        append(folder, batch_id, data, **options)

    monkeypatch.setattr(server.batch_store, "_append", fail)
    with sync_client(server) as client:
        batch = end_of(client, begin(client, *(line(str(i)) for i in range(8))))
        assert (batch.status, counts(batch)) == ("completed", (8, 8, 0))
        assert len(results(client, batch.output_file_id)) == 8


def test_results_that_a_store_has_lost_are_computed_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server, lost = serve(FakeEngineClient()), iter(range(3))
    add = server.batch_store.add_result

    async def lose(batch_id: str, n: int, result: str, *, failed: bool) -> None:
        if n != 2 or next(lost, None) is None:
            await add(batch_id, n, result, failed=failed)

    monkeypatch.setattr(server.batch_store, "add_result", lose)
    with sync_client(server) as client:
        batch = end_of(client, begin(client, *(line(str(i)) for i in range(4))))
        assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (4, 4, 0), None)
        assert [one["custom_id"] for one in results(client, batch.output_file_id)] == ["0", "1", "2", "3"]
    assert len(server.engine.submitted) == 4 + 3


def test_lines_wait_while_their_key_has_no_tokens_and_do_not_count_as_its_requests(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("a: key-of-a\nb: key-of-b\n")
    engine = FakeEngineClient(auto=False, info=replace(INFO, max_num_seqs=4, max_num_queued_reqs=4))
    server = serve(engine, api_key_file=tmp_path / "keys", max_requests_per_key=1)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="key-of-a", max_retries=0)
    begin(client, *(line(str(i), prompt="x", n=2) for i in range(8)))
    engine.wait_for(lambda: len(engine.submitted) == 6)  # 4 slots and half of a queue of 4
    stream = client.completions.create(model="test-model", prompt="yy", max_tokens=3, stream=True)
    engine.wait_for(lambda: len(engine.submitted) == 7)
    assert not engine.submitted[-1].is_filler
    stream.close()
    other = openai.OpenAI(base_url=server.url + "/v1", api_key="key-of-b", max_retries=0)
    batch_id = client.batches.list().data[0].id
    assert other.batches.list().data == []
    for call in (other.batches.retrieve, other.batches.cancel):
        assert refused(lambda call=call: call(batch_id))[:2] == (404, "batch_not_found")  # type: ignore[misc]
    assert end_of(client, client.batches.cancel(batch_id)).status == "cancelled"
    client.close()
    other.close()


def test_a_line_without_tokens_left_waits(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a: key-of-a\n")
    engine = FakeEngineClient(info=replace(INFO, max_num_seqs=1))
    server = serve(engine, api_key_file=tmp_path / "keys", max_tokens_per_minute_per_key=600)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="key-of-a", max_retries=0)
    batch = end_of(client, begin(client, *(line(str(i), prompt="x" * 100, max_tokens=1) for i in range(7))))
    assert (batch.status, counts(batch)) == ("completed", (7, 7, 0))
    client.close()


def test_lines_are_not_held_while_their_answers_are_computed(serve: Serve) -> None:
    def lines() -> list[RawLine | BatchLine]:
        return [one for one in gc.get_objects() if isinstance(one, RawLine | BatchLine)]

    engine, earlier = FakeEngineClient(auto=False), lines()
    with sync_client(serve(engine)) as client:
        batch = begin(client, *(line(name) for name in "abc"))
        engine.wait_for(lambda: len(engine.submitted) == 3)
        new = [one for one in lines() if not any(one is other for other in earlier)]
        assert len(new) >= 3
        assert [one for one in new if (one.data if isinstance(one, RawLine) else one.body)] == []
        for _ in "abc":
            engine.from_outside(engine.step)
        assert counts(end_of(client, batch)) == (3, 3, 0)


def test_a_line_that_fails_in_the_engine_fails_alone(serve: Serve) -> None:
    def reply(request: Any) -> Iterator[TokenOutput]:
        if len(request.prompt_token_ids) == 2:
            return iter([TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="it broke")])
        return good(request)

    engine = FakeEngineClient()
    good, engine.reply = engine.reply, reply
    with sync_client(serve(engine)) as client:
        batch = end_of(client, begin(client, line("a"), line("b", prompt="xx"), line("c")))
        assert counts(batch) == (3, 2, 1)
        [error] = results(client, batch.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("b", 500)


def test_only_so_many_batches_wait(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "MAX_UNFINISHED", 1)
    monkeypatch.setattr(batches_module, "MAX_ENDED", 1)
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    with sync_client(server) as client:
        first = begin(client, line("a"))
        says = "at most 1 batches may run or wait, and of a key 1: 1 of yours do"
        assert refused(lambda: begin(client, line("a"))) == (429, "too_many_kept", None, says)
        end_of(client, client.batches.cancel(first.id))
        second = begin(client, line("a"))
        end_of(client, client.batches.cancel(second.id))
        while len(client.batches.list().data) > 1:
            pass
        assert [batch.id for batch in client.batches.list()] == [second.id]
        metrics = client._client.get(f"{server.url}/metrics").text
        assert 'gptserve_batches{model_name="test-model",status="cancelled"} 1.0' in metrics
        assert 'gptserve_batch_lines_total{model_name="test-model",result="completed"} 0.0' in metrics
