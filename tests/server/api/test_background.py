"""Background completions over a FakeEngineClient: read whole, followed by events from anywhere, cancelled."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

import gptserve.server.api.background
from gptserve.engine.request import FinishReason, Request, TokenOutput
from gptserve.server.schemas.completions import BackgroundCompletion, KeptChatCompletion, KeptCompletion
from tests.server.api.test_completions import TEXT, Events, send_raw, stream
from tests.server.conftest import MODEL, NO_IDS, OF_PROMPT, OPENING, Api, LiveServer
from tests.server.fake_engine import INFO, ByteTokenizer, FakeEngineClient, say

Serve = Callable[..., LiveServer]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
BODIES: list[dict[str, Any]] = [
    {"prompt": "x"},
    {"prompt": ["x", "yz"], "n": 2, "echo": True, "logprobs": 2},
    {"prompt": "x", "stop": ["é✓"], "n": 3},
    {"prompt": "x", "stream": True, "stream_options": USAGE, "n": 2},
    {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}},
    CHAT,
    CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2},
]


in_a_folder_or_not = pytest.mark.parametrize(
    ("body", "durable"),
    [
        pytest.param(body, durable, marks=() if durable or body is BODIES[0] else pytest.mark.slow)
        for body in BODIES
        for durable in (True, False)
    ],
)


def post(server: LiveServer, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    """Ask for a completion, or a chat where there are messages."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if path == "/v1/completions":
        body = {"prompt": "x", **body}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=20)


def begin(server: LiveServer, **body: Any) -> str:
    """Begin a background completion; return its id."""
    response = post(server, background=True, **{**body, "stream": False, "stream_options": None})
    assert response.status_code == 202
    return str(response.json()["id"])


def get(server: LiveServer, completion_id: str, rest: str = "", **arguments: Any) -> httpx.Response:
    return httpx.get(f"{server.url}/v1/completions/{completion_id}{rest}", timeout=20, **arguments)


def cancel(server: LiveServer, completion_id: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions/{completion_id}/cancel", timeout=20)


def finished(server: LiveServer, completion_id: str) -> dict[str, Any]:
    """Return a completion once it has ended, which its events say."""
    assert get(server, completion_id, "/events").status_code == 200
    found: dict[str, Any] = get(server, completion_id).json()
    return found


def step(engine: FakeEngineClient) -> None:
    """Let the engine make one step, and wait for it."""
    done = threading.Event()
    engine.from_outside(lambda: (engine.step(), done.set())[0])
    assert done.wait(20)


def split(text: str) -> list[str]:
    """Return the events of a stream."""
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


def error_of(event: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.removeprefix("data: "))["error"]
    return found


def test_a_background_completion_is_answered_at_once_and_goes_on(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    response = post(server, background=True, max_tokens=3, seed=5)
    accepted = response.json()
    BackgroundCompletion.model_validate(accepted, strict=True, extra="forbid")
    assert response.status_code == 202
    completion_id = accepted.pop("id")
    assert accepted.pop("created") > 0
    assert accepted == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": "fake-1",
        "batch_invariant": True,
        "seed": 5,
        "status": "queued",
    }
    queued = get(server, completion_id).json()
    assert (queued["status"], queued["choices"][0]["text"], queued["usage"]["completion_tokens"]) == ("queued", "", 0)

    with httpx.stream("GET", f"{server.url}/v1/completions/{completion_id}/events", timeout=20) as response:
        events = Events(response)
        engine.from_outside(engine.step)
        assert events.next_text() == "a"
        partial = get(server, completion_id).json()
        engine.from_outside(engine.step)
        engine.from_outside(engine.step)
        assert len(events.rest()) == 3
    whole = get(server, completion_id).json()

    KeptCompletion.model_validate(whole, strict=True, extra="forbid")
    assert (partial["status"], partial["error"]) == ("in_progress", None)
    assert partial["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None, **NO_IDS, **OF_PROMPT}
    ]
    assert (whole["status"], whole["error"], whole["usage"]["total_tokens"]) == ("completed", None, 4)
    assert whole["choices"] == [
        {
            "index": 0,
            "text": "abc",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            **NO_IDS,
            **OF_PROMPT,
        }
    ]
    assert {name: whole[name] for name in accepted if name != "status"} | {"status": "queued"} == accepted


def test_events_have_the_scores_of_a_prompt_before_there_is_text(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("é")))
    events = get(server, begin(server, prompt="hi", max_tokens=2, prompt_logprobs=0), "/events").text
    parts = [json.loads(event.partition("data: ")[2])["choices"][0] for event in split(events)[:-1]]
    assert [part["text"] for part in parts] == ["", "é"], "the first token has no whole character"
    assert [len(part.get("prompt_logprobs", [])) for part in parts] == [2, 0]


@pytest.mark.parametrize("body", [{"prompt": "hi"}, CHAT], ids=["text", "chat"])
def test_events_have_the_scores_of_a_prompt_whose_first_token_has_text(serve: Serve, body: dict[str, Any]) -> None:
    server = serve(FakeEngineClient(say("ab")))
    begun = post(server, background=True, n=2, max_tokens=2, prompt_logprobs=1, **body)
    *parts, _ = split(get(server, begun.json()["id"], "/events").text)
    events = [json.loads(part.partition("data: ")[2]) for part in parts]
    whole = get(server, begun.json()["id"]).json()
    if "messages" in body:
        found = [chunk["prompt_logprobs"] for chunk in events if "prompt_logprobs" in chunk]
        assert found == [whole["prompt_logprobs"]]
    else:
        choices = [chunk["choices"][0] for chunk in events]
        scored = {choice["index"]: choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice}
        assert scored == {choice["index"]: choice["prompt_logprobs"] for choice in whole["choices"]}


def test_a_result_is_rendered_beside_the_event_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    live, threads = serve(FakeEngineClient()), []
    render = gptserve.server.api.background.json_response

    def spy(answer: dict[str, object]) -> Response:
        threads.append(threading.get_ident())
        return render(answer)

    monkeypatch.setattr(gptserve.server.api.background, "json_response", spy)
    finished(live, begin(live))
    live.engine.from_outside(lambda: threads.append(threading.get_ident()))
    step(live.engine)
    rendering, loop = threads
    assert rendering != loop


@pytest.mark.some(3)
@in_a_folder_or_not
def test_a_background_completion_is_the_one_that_would_be_answered(
    serve: Serve, body: dict[str, Any], durable: bool, tmp_path: Path
) -> None:
    server = serve(FakeEngineClient(say(TEXT, then_eos=True)), state_dir=tmp_path if durable else None)
    body = {**body, "max_tokens": 100, "seed": 1}
    body.pop("stream", None), body.pop("stream_options", None)
    result = finished(server, begin(server, **body))
    direct = post(server, **body).json()
    model = KeptChatCompletion if "messages" in body else KeptCompletion
    model.model_validate(result, strict=True, extra="forbid")
    assert (result.pop("status"), result.pop("error")) == ("completed", None)
    assert result | {"id": 0, "created": 0} == direct | {"id": 0, "created": 0}


@pytest.mark.some(3)
@in_a_folder_or_not
def test_every_reader_gets_the_same_bytes_live_or_later(
    serve: Serve, body: dict[str, Any], durable: bool, tmp_path: Path
) -> None:
    engine = FakeEngineClient(say(TEXT, then_eos=True), auto=False)
    server = serve(engine, state_dir=tmp_path if durable else None)
    body = {**body, "max_tokens": 100, "seed": 1}
    streamed = body.get("stream", False)
    begun = post(server, background=True, **body | {"stream": False, "stream_options": None})
    texts: list[str] = []

    def follow() -> None:
        texts.append(get(server, begun.json()["id"], "/events").text)

    readers = [threading.Thread(target=follow) for _ in range(2)]
    url = f"{server.url}/v1/completions/{begun.json()['id']}/events"
    with httpx.stream("GET", url, timeout=20) as live:
        for reader in readers:
            reader.start()
        while engine.live_ids:
            step(engine)
        texts.append(live.read().decode())
    for reader in readers:
        reader.join(20)
    follow()
    follow()
    assert len(texts) == 5
    assert len(set(texts)) == 1
    assert split(texts[0])[-1] == "data: [DONE]"
    check_ids(split(texts[0])[:-1])
    if streamed:
        return

    engine.from_outside(lambda: setattr(engine, "_auto", True))
    direct = post(server, **body, stream=True).text

    def same(text: str) -> list[dict[str, Any]]:
        data = [json.loads(event.partition("data: ")[2]) for event in split(text)[:-1]]
        return sorted((chunk | {"id": 0, "created": 0} for chunk in data), key=lambda c: c["choices"][0]["index"])

    assert same(texts[0]) == same(direct)


def id_of(event: str) -> str | None:
    """Return the id of an event; those that open a chat have none."""
    first, _, _ = event.partition("\n")
    return first.removeprefix("id: ") if first.startswith("id: ") else None


def check_ids(events: list[str]) -> None:
    """Check that each event adds tokens to its choice, and that of the usage comes last.

    A token that adds no text to another choice has no event, and is in the next id.
    """
    ids = [event_id for event_id in map(id_of, events) if event_id is not None]
    had = [0] * (ids[0].count(".") + 1)
    for event in events:
        event_id, choices = id_of(event), json.loads(event.partition("data: ")[2])["choices"]
        if event_id is None:
            assert (choices[0]["delta"], had) == (OPENING, [0] * len(had))
        elif choices:
            counts = list(map(int, event_id.split(".")))
            assert counts[choices[0]["index"]] > had[choices[0]["index"]]
            assert all(count >= before for count, before in zip(counts, had, strict=True))
            had = counts
        else:
            assert (event_id, event) == (".".join(map(str, had)) + ".end", events[-1])
    assert len(set(ids)) == len(ids)


def check_resumption(server: LiveServer, everything: list[str]) -> None:
    """Check that a client that has the events up to any that has an id gets those after it."""
    completion_id = json.loads(everything[0].partition("data: ")[2])["id"]
    for number, event in enumerate(everything[:-1], 1):
        event_id = id_of(event)
        if event_id is None:
            continue
        by_query = get(server, completion_id, f"/events?starting_after={event_id}")
        by_header = get(server, completion_id, "/events", headers={"last-event-id": event_id})
        assert by_query.text == by_header.text
        if number == len(everything) - 1:
            assert (by_query.status_code, by_query.text) == (204, ""), "an EventSource would come back for ever"
        else:
            assert split(by_query.text) == everything[number:]


def num(text: str) -> int:
    return len(split(text)) - 1


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("n", "body", "options"),
    [
        pytest.param(n, body, options, marks=() if (n == 3) == (options is USAGE) else pytest.mark.slow)
        for n in (1, 3)
        for body in ({}, CHAT)
        for options in (USAGE, {"include_usage": True}, {})
    ],
)
def test_the_stream_that_began_it_is_followed_from_any_event(
    serve: Serve, body: dict[str, Any], options: dict[str, Any], n: int
) -> None:
    server = serve(FakeEngineClient(say(TEXT)))
    text = post(server, background=True, stream=True, stream_options=options, n=n, max_tokens=9, **body).text
    check_ids(split(text)[:-1])
    check_resumption(server, split(text))


def test_the_query_wins_over_the_header(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    completion_id = begin(server, max_tokens=5)
    everything = split(get(server, completion_id, "/events").text)
    both = get(server, completion_id, "/events?starting_after=1", headers={"last-event-id": "3"})
    assert split(both.text) == everything[1:]


def in_steps_of(size: int) -> Callable[[Request], Iterator[TokenOutput]]:
    """Return a reply of TEXT that gives several tokens at once, as an engine with drafts does."""

    def reply(request: Request) -> Iterator[TokenOutput]:
        outputs = list(itertools.islice(say(TEXT, then_eos=True)(request), len(TEXT.encode()) + 1))
        for start in range(0, len(outputs), size):
            step = outputs[start : start + size]
            token_ids = tuple(token_id for output in step for token_id in output.token_ids)
            logprobs = tuple(score for output in step for score in output.logprobs)
            yield replace(step[-1], token_ids=token_ids, logprobs=logprobs)

    return reply


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": 1},
        pytest.param({"stop": ["✓"]}, marks=pytest.mark.slow),
        pytest.param({"return_token_ids": True}, marks=pytest.mark.slow),
    ],
)
def test_the_events_are_one_a_token_however_many_a_step_gives(serve: Serve, body: dict[str, Any]) -> None:
    texts = []
    for size in (1, 2, 5):
        server = serve(FakeEngineClient(in_steps_of(size), info=replace(INFO, fingerprint="same")))
        everything = split(post(server, background=True, stream=True, n=2, seed=1, max_tokens=100, **body).text)
        check_resumption(server, everything)
        head = json.loads(everything[0].partition("data: ")[2])
        texts.append(sorted(event.replace(head["id"], "").partition('"choices"')[2] for event in everything))
        for index in (0, 1):
            of_choice = [event for event in everything[:-1] if f'"index":{index}' in event]
            assert len(of_choice) > 3
    assert texts[0] == texts[1] == texts[2]


def test_a_choice_whose_time_ran_out_counts_its_end_and_so_does_one_without_tokens(serve: Serve) -> None:
    def reply(request: Request) -> Iterator[TokenOutput]:
        yield TokenOutput(request.request_id, (97,))
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.TIMEOUT)

    server = serve(FakeEngineClient(reply))
    everything = split(post(server, background=True, stream=True).text)
    assert list(map(id_of, everything)) == ["1", "2", None]
    check_resumption(server, everything)
    only_echo = split(post(server, background=True, stream=True, echo=True, max_tokens=0).text)
    assert list(map(id_of, only_echo)) == ["1", None]
    check_resumption(server, only_echo)


MALFORMED = ["-1", "1-5", "x", "", "1" * 10, "٣", "1.", ".1", "1..2", "1.end.2", "end", "1.END"]


@pytest.mark.parametrize("name", ["starting_after", "Last-Event-ID"])
def test_a_bad_event_id_is_refused(serve: Serve, name: str) -> None:
    server = serve(FakeEngineClient())
    completion_id = begin(server)
    for value in MALFORMED:
        if name == "starting_after":
            response, seen = get(server, completion_id, "/events", params={name: value}), value
        else:
            response = get(server, completion_id, "/events", headers=[(name.encode(), value.encode())])
            seen = value.encode().decode("latin-1")
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": f"{name} must be the id of an event, the number of tokens of each choice, "
            f"such as 17 or 17.16.18, got {seen!r}",
            "type": "invalid_request_error",
            "param": name,
            "code": "invalid_value",
        }


@pytest.mark.parametrize(
    ("n", "value", "rule"),
    [
        (1, "1.5", "must have one number"),
        (3, "0", "must have 3 numbers, one for each choice"),
        (1, "6", "may be at most 5, as the completion has no more tokens"),
        (2, "5.6", "may be at most 5.5, as the completion has no more tokens"),
    ],
)
@pytest.mark.parametrize("is_running", [True, False])
def test_an_event_id_that_the_completion_cannot_have_is_refused(
    serve: Serve, n: int, value: str, rule: str, is_running: bool
) -> None:
    server = serve(FakeEngineClient(auto=not is_running))
    completion_id = begin(server, n=n, max_tokens=5)
    if not is_running:
        finished(server, completion_id)
    refused = get(server, completion_id, f"/events?starting_after={value}")
    message = f"starting_after {rule}, got '{value}'"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("is_running", [True, False])
def test_the_id_of_a_usage_that_the_stream_does_not_have_is_refused(serve: Serve, is_running: bool) -> None:
    server = serve(FakeEngineClient(auto=not is_running))
    refused = get(server, begin(server, max_tokens=5), "/events?starting_after=5.end")
    message = "starting_after may not have .end, as the stream has no event with the usage, got '5.end'"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


def test_the_id_of_a_usage_before_the_last_token_is_refused(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    begun = post(server, background=True, stream=True, stream_options={"include_usage": True}, n=2, max_tokens=5)
    path = f"/v1/completions/{json.loads(split(begun.text)[0].partition('data: ')[2])['id']}/events"
    for event_id in ("0.0.end", "5.4.end"):
        refused = httpx.get(f"{server.url}{path}?starting_after={event_id}", timeout=20)
        message = f"starting_after may have .end only after all tokens, 5.5, got '{event_id}'"
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    assert httpx.get(f"{server.url}{path}?starting_after=5.5.end", timeout=20).status_code == 204


@pytest.mark.parametrize(
    ("event_id", "message"),
    [("3.end", None), ("2.end", "starting_after may have .end only after all tokens, 3, got '2.end'")],
)
def test_who_has_the_usage_of_a_completion_that_runs_again_gets_no_second_one(
    serve: Serve, event_id: str, message: str | None
) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    with stream(server, background=True, stream_options={"include_usage": True}, max_tokens=3) as events:
        engine.from_outside(engine.step)
        completion_id = json.loads(events.next_data())["id"]
    path = f"{server.url}/v1/completions/{completion_id}/events?starting_after={event_id}"
    with httpx.stream("GET", path, timeout=20) as response:
        for _ in range(2):
            engine.from_outside(engine.step)
        *others, end = split(response.read().decode())
    if message is None:
        assert (others, end) == ([], "data: [DONE]")
    else:
        assert error_of(end)["message"] == message


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_tokens_that_were_lost_are_computed_again_only_if_they_are_the_same(
    serve: Serve, batch_invariant: bool
) -> None:
    engine = FakeEngineClient(auto=False, info=replace(INFO, batch_invariant=batch_invariant))
    server = serve(engine)
    completion_id = begin(server, max_tokens=3)
    path = f"{server.url}/v1/completions/{completion_id}/events"
    with httpx.stream("GET", path, timeout=20) as response:
        events = Events(response)
        engine.from_outside(engine.step)
        assert events.next_text() == "a"
    with httpx.stream("GET", f"{path}?starting_after=2", timeout=20) as response:
        if batch_invariant:
            for _ in range(2):
                engine.from_outside(engine.step)
            assert list(map(id_of, split(response.read().decode()))) == ["3", None]
            return
        assert response.status_code == 400
        refused = json.loads(response.read())["error"]
    why = "as the completion has no more tokens so far and batch_invariant is false"
    assert refused["message"] == f"starting_after may be at most 1, {why}, got '2'"
    with httpx.stream("GET", f"{path}?starting_after=1", timeout=20) as response:
        for _ in range(2):
            engine.from_outside(engine.step)
        assert list(map(id_of, split(response.read().decode()))) == ["2", "3", None]


def test_an_event_id_of_another_tokenizer_is_no_hindrance_to_the_error(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = LiveServer(FakeEngineClient(), state_dir=tmp_path)
    with first.running():
        completion_id = begin(first, n=2, max_tokens=3)
        finished(first, completion_id)
    monkeypatch.setattr(ByteTokenizer, "fingerprint", "other")
    second = serve(FakeEngineClient(), state_dir=tmp_path)
    for event_id in ("2.2", "3.3", "9"):
        answer = get(second, completion_id, "/events", headers={"last-event-id": event_id})
        [error] = split(answer.text)
        assert error_of(error)["code"] == "model_changed"


@pytest.mark.parametrize("name", ["starting_after", "Last-Event-ID"])
@pytest.mark.parametrize(
    ("key", "body"),
    [
        ({}, {}),
        ({}, {"stream": True}),
        ({}, {"background": True}),
        ({"idempotency-key": "k"}, {}),
        ({}, CHAT | {"stream": True}),
    ],
)
def test_an_event_id_without_a_stream_that_has_them_is_refused(
    serve: Serve, name: str, key: dict[str, str], body: dict[str, Any]
) -> None:
    server = serve(FakeEngineClient())
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {**({} if "messages" in body else {"prompt": "x"}), "seed": 1, **body}
    given = {"params": {name: "1"}} if name == "starting_after" else {"headers": {name: "1"}}
    headers = key | given.pop("headers", {})
    refused = httpx.post(server.url + path, json=body, headers=headers, timeout=20, **given)
    assert refused.json()["error"] == {
        "message": f"{name} may be given only with stream true, and with background or an Idempotency-Key",
        "type": "invalid_request_error",
        "param": name,
        "code": "invalid_value",
    }
    assert (refused.status_code, server.engine.submitted) == (400, [])


def test_an_ended_completion_has_no_more_tokens_than_it_made(serve: Serve) -> None:
    server = serve(FakeEngineClient(say("ab", then_eos=True)))
    completion_id = begin(server, max_tokens=50)
    finished(server, completion_id)
    refused = get(server, completion_id, "/events?starting_after=4").json()["error"]
    assert refused["message"] == "starting_after may be at most 3, as the completion has no more tokens, got '4'"


def test_a_bad_event_id_is_refused_beside_a_good_one(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    path = "/events?starting_after=1"
    response = get(server, begin(server), path, headers={"last-event-id": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize(("method", "rest"), [("GET", ""), ("GET", "/events"), ("POST", "/cancel")])
def test_an_unknown_completion_is_not_found(serve: Serve, method: str, rest: str) -> None:
    server = serve(FakeEngineClient())
    direct = post(server).json()["id"]
    for completion_id in ("cmpl-0", direct):
        response = httpx.request(method, f"{server.url}/v1/completions/{completion_id}{rest}", timeout=20)
        assert response.status_code == 404
        assert response.json()["error"] == {
            "message": f"completion {completion_id!r} does not exist: "
            "it did not run in the background, or it has expired",
            "type": "invalid_request_error",
            "param": "id",
            "code": "completion_not_found",
        }


def test_a_background_stream_goes_on_when_its_client_hangs_up(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    with stream(server, background=True, max_tokens=3) as events:
        engine.from_outside(engine.step)
        completion_id = json.loads(events.next_data())["id"]
    engine.from_outside(engine.step)
    engine.from_outside(engine.step)
    rest = split(get(server, completion_id, "/events?starting_after=1").text)
    assert [event.partition("\n")[0] for event in rest] == ["id: 2", "id: 3", "data: [DONE]"]
    assert engine.aborted == []


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_cancelled_completion_frees_the_engine_and_says_so(serve: Serve, num_steps: int) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    completion_id = begin(server, n=2, max_tokens=100)
    url = f"{server.url}/v1/completions/{completion_id}/events"
    with httpx.stream("GET", url, timeout=20) as response:
        events = Events(response)
        for _ in range(num_steps):
            engine.from_outside(engine.step)
            assert (events.next_text(), events.next_text()) in (("a", "a"), ("b", "b"))
        cancelled = cancel(server, completion_id)
        assert engine.live_ids == []
        (end,) = events.rest()
    expected = {
        "message": "the completion was cancelled",
        "type": "invalid_request_error",
        "param": None,
        "code": "cancelled",
    }
    body = cancelled.json()
    KeptCompletion.model_validate(body, strict=True, extra="forbid")
    assert (cancelled.status_code, body["status"], body["error"]) == (200, "cancelled", expected)
    assert [choice["text"] for choice in body["choices"]] == ["ab"[:num_steps]] * 2
    assert [choice["finish_reason"] for choice in body["choices"]] == [None, None]
    assert error_of(end) == expected
    assert error_of(split(get(server, completion_id, "/events").text)[-1]) == expected
    assert cancel(server, completion_id).json() == body == get(server, completion_id).json()
    assert post(server, max_tokens=0).status_code == 400
    assert server.app.state.lifecycle.num_active == 0


def test_what_has_ended_is_not_cancelled(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    whole = finished(server, begin(server, max_tokens=3))
    assert whole["status"] == "completed"
    assert cancel(server, whole["id"]).json() == whole


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_failed_completion_tells_why_to_all_who_ask(serve: Serve, num_tokens: int) -> None:
    def reply(request: Any) -> Any:
        outputs = say("abc")(request)
        yield from (next(outputs) for _ in range(num_tokens))
        yield TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error="its logits were not finite")

    server = serve(FakeEngineClient(reply))
    failed = finished(server, begin(server))
    expected = {
        "message": "choice 0: its logits were not finite",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
    assert (failed["status"], failed["error"], failed["choices"][0]["text"]) == ("failed", expected, "ab"[:num_tokens])
    *_, end = split(get(server, failed["id"], "/events").text)
    assert error_of(end) == expected
    ended = 'gptserve_request_success_total{finished_reason="error",model_name="test-model"} 1.0'
    assert ended in httpx.get(server.url + "/metrics").text


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_nobody_back(serve: Serve) -> None:
    num_tokens = 30_000  # some 8 MB of events: more than the sockets between hold
    engine = FakeEngineClient(info=replace(INFO, max_model_len=10**6))
    server = serve(engine)
    slow = send_raw(server, stream=True, background=True, max_tokens=num_tokens)
    engine.wait_for(lambda: engine.num_outputs >= num_tokens)
    head = b""
    while b'"id":"' not in head:
        head += slow.recv(1)
    head += slow.recv(100)
    completion_id = head.partition(b'"id":"')[2].partition(b'"')[0].decode()
    assert num(get(server, completion_id, "/events").text) == num_tokens
    assert server.app.state.lifecycle.num_active == 0
    with slow:
        received = head + b"".join(iter(lambda: slow.recv(2**20), b""))
    assert received.count(b"data: {") == num_tokens
    assert b"data: [DONE]" in received[-100:]


def test_a_reader_that_hangs_up_leaves_the_others_alone(serve: Serve) -> None:
    engine = FakeEngineClient(auto=False)
    server = serve(engine)
    completion_id = begin(server, max_tokens=2)
    url = f"{server.url}/v1/completions/{completion_id}/events"
    with httpx.stream("GET", url, timeout=20) as first, httpx.stream("GET", url, timeout=20) as second:
        engine.from_outside(engine.step)
        assert Events(first).next_text() == "a"
        first.close()
        engine.from_outside(engine.step)
        assert Events(second).rest()[-1] == "[DONE]"


def test_without_background_nothing_is_stored(serve: Serve) -> None:
    server = serve(FakeEngineClient())
    post(server, background=False)
    post(server, background=None, stream=True)
    assert 'gptserve_kept_completions{model_name="test-model",status="completed"} 0.0' in metrics(server)
    finished(server, begin(server))
    assert 'gptserve_kept_completions{model_name="test-model",status="completed"} 1.0' in metrics(server)


def metrics(server: LiveServer) -> str:
    return httpx.get(server.url + "/metrics", timeout=20).text


def test_a_full_queue_refuses_a_background_completion_and_keeps_nothing(serve: Serve) -> None:
    engine = FakeEngineClient()
    engine.max_requests = 1
    server = serve(engine)
    refused = post(server, background=True, n=2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert 'status="queued"} 0.0' in metrics(server)
    assert post(server, background=True).status_code == 202


@pytest.mark.parametrize("durable", [True, False])
def test_while_draining_results_are_answered(serve: Serve, durable: bool, tmp_path: Path) -> None:
    server = serve(FakeEngineClient(), state_dir=tmp_path if durable else None)
    whole = finished(server, begin(server, max_tokens=3))
    server.app.state.lifecycle.drain()
    assert get(server, whole["id"]).json() == whole
    assert num(get(server, whole["id"], "/events").text) == 3
    assert post(server, background=True).status_code == 503


@pytest.mark.parametrize(
    ("path", "asked", "what"),
    [
        ("completions", {"json": {"prompt": "a", "background": True}}, "background"),
        ("responses", {"json": {"input": "a", "background": True}}, "background"),
        ("files", {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}, "a file"),
        ("batches", {"json": {"input_file_id": "file-1", "endpoint": "/v1/completions"}}, "a batch"),
    ],
)
def test_one_of_several_servers_that_share_nothing_keeps_nothing_for_a_later_request(
    make_api: Callable[..., Api], path: str, asked: dict[str, Any], what: str
) -> None:
    """A key needs no server's memory, and what a client waits for neither."""
    api = make_api(FakeEngineClient(), is_one_of_several=True)
    refused = api.request("POST", f"/v1/{path}", **asked)
    assert refused.status_code == 501
    error = refused.json()["error"]
    message = f"{what} needs --state-url here, as the next request may go to another server"
    assert (error["code"], error["message"]) == ("not_implemented", message)
    body = {"prompt": "a", "max_tokens": 2}
    keyed = api.request("POST", "/v1/completions", json=body, headers={"idempotency-key": "k"})
    assert (keyed.status_code, api.complete(**body).status_code) == (200, 200)
    assert api.request("POST", "/v1/responses", json={"input": "a", "max_output_tokens": 2}).status_code == 200
