"""An answer goes on at the next URL that answers, exactly where it was lost; if none does, one sentence says why."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gptserve.server.cli import replicas
from gptserve.server.cli.replicas import Replicas
from tests.server.cli.conftest import StandIn, standing_in
from tests.server.serving import LIMIT_S

LOST = "the stream ended in the middle of the answer"
REFUSED = (503, '{"error": {"message": "the server is shutting down", "code": "draining"}}')


@pytest.fixture
def other() -> Iterator[StandIn]:
    with standing_in() as http:
        yield http


def event(text: str, event_id: str | None, fingerprint: str = "a", seed: int = 7) -> str:
    """Return an event of a completion, with the id that its reader then has."""
    head = {"id": "cmpl-1", "system_fingerprint": fingerprint, "seed": seed}
    data = json.dumps({**head, "choices": [{"index": 0, "text": text}]})
    return f"data: {data}\n\n" if event_id is None else f"id: {event_id}\ndata: {data}\n\n"


def stream(*events: str) -> tuple[int, str]:
    return 200, "".join(events)


DONE = "data: [DONE]\n\n"


def complete(run: Any, *servers: StandIn) -> tuple[object, str, str]:
    urls = [word for server in servers for word in ("--url", server.url)]
    outcome: tuple[object, str, str] = run("complete", "x", *urls)
    return outcome


@pytest.mark.parametrize(
    "end", ["", 'data: {"error": {"message": "the server is shutting down", "code": "draining"}}\n\n']
)
def test_an_answer_that_loses_its_server_goes_on_after_its_last_event(
    end: str, run: Any, server: StandIn, other: StandIn
) -> None:
    server.answer = stream(event("Once", "1"), event(" upon", "2"), end)
    other.answer = stream(event(" a time", "3"), DONE)

    assert complete(run, server, other) == (0, "Once upon a time\n", "")
    assert server.asked == other.asked, "the same key is for the same body"
    [(key, after)], [(same, after_two)] = server.asked_with, other.asked_with
    assert key is not None
    assert (after, same, after_two) == (None, key, "2")


def test_a_chat_goes_on_too_and_stays_at_the_server_that_answers(server: StandIn, other: StandIn) -> None:
    server.answer, other.answer = REFUSED, stream(event("Once", "1"), DONE)
    replicas = Replicas([server.url, other.url], None)

    texts = [piece.text for _ in range(2) for piece in replicas.stream("/v1/completions", {})]

    assert (texts, replicas.url) == (["Once", "Once"], other.url)
    assert (len(server.asked), len(other.asked)) == (1, 2)
    assert other.asked_with[0][0] != other.asked_with[1][0], "each answer has its own key"


def test_a_message_from_a_pipe_goes_on(
    run: Any, server: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who?")))
    monkeypatch.setenv("GPTSERVE_URL", f"{server.url}, {other.url}")
    said = [event(text, str(i + 1)).replace('"text": ', '"delta": {"content": ') for i, text in enumerate("ab")]
    server.answer, other.answer = stream(said[0].replace("}]}", "}}]}")), stream(said[1].replace("}]}", "}}]}"), DONE)

    assert run("chat") == (0, "ab\n", "")
    assert server.path == other.path == "/v1/chat/completions"


@pytest.mark.some(2)
@pytest.mark.parametrize("status", [404, 408, 429, 502, 503, 504])
def test_a_server_that_cannot_answer_is_passed_by(status: int, run: Any, server: StandIn, other: StandIn) -> None:
    server.answer, other.answer = (status, ""), stream(event("there", "1"), DONE)

    assert complete(run, server, other) == (0, "there\n", "")


def test_a_server_that_is_not_there_is_passed_by(run: Any, server: StandIn, other: StandIn) -> None:
    other.answer = stream(event("there", "1"), DONE)

    assert run("complete", "x", "--url", "http://127.0.0.1:1", "--url", other.url) == (0, "there\n", "")


def test_the_model_is_named_by_whoever_answers(other: StandIn) -> None:
    assert Replicas(["http://127.0.0.1:1", other.url], None).model_name() == "teller"


def test_a_request_that_is_wrong_is_refused_once(run: Any, server: StandIn, other: StandIn) -> None:
    server.answer = 400, '{"error": {"message": "max_tokens must be at least 1"}}'

    assert complete(run, server, other) == (1, "", "gptserve: max_tokens must be at least 1\n")
    assert other.asked == []


def test_an_answer_whose_every_event_has_come_ends(run: Any, server: StandIn, other: StandIn) -> None:
    server.answer, other.answer = stream(event("there", "1")), (204, "")

    assert complete(run, server, other) == (0, "there\n", "")


def test_if_no_server_answers_the_last_one_is_named(
    run: Any, server: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "PATIENCE_S", 0.0)
    server.answer, other.answer = stream(event("a", "1")), REFUSED

    expected = f"2 servers were asked in vain, the last, {other.url}: the server is shutting down"
    assert complete(run, server, other) == (1, "a\n", f"gptserve: {expected}\n")


@pytest.mark.parametrize(("first", "after"), [(event("a", "1"), "1"), ("", None)], ids=["in a text", "before it"])
def test_an_answer_that_has_begun_waits_for_a_server(
    first: str, after: str | None, run: Any, server: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come_back(seconds: float) -> None:
        assert (seconds, len(other.asked)) == (replicas.PAUSE_S, 1), "all have been asked"
        server.answer = stream(event("b", "2"), DONE)

    monkeypatch.setattr(replicas.time, "sleep", come_back)
    server.answer, other.answer = stream(first), REFUSED

    assert complete(run, server, other) == (0, "ab\n" if first else "b\n", "")
    assert [last for _, last in server.asked_with] == [None, after]


def test_each_event_gives_the_servers_another_chance(run: Any, server: StandIn, other: StandIn) -> None:
    answers = [stream(event("a", "1")), stream(event("b", "2")), stream(event("c", "3"), DONE)]
    servers = [server, other, server]

    def parts(index: int) -> Iterator[str]:
        yield answers[index][1]
        if index + 2 < len(answers):
            servers[index].answer = 200, parts(index + 2)

    server.answer, other.answer = (200, parts(0)), (200, parts(1))

    assert complete(run, server, other) == (0, "abc\n", "")
    assert [after for _, after in server.asked_with] == [None, "2"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"fingerprint": "b"}, "its system_fingerprint is b, not a"),
        ({"seed": 8}, "its seed is 8, not 7"),
    ],
)
def test_no_text_of_another_answer_is_shown(
    changed: dict[str, Any], expected: str, run: Any, server: StandIn, other: StandIn
) -> None:
    server.answer, other.answer = stream(event("a", "1")), stream(event("b", "2", **changed), DONE)
    server.answer = (200, _first_then(server, server.answer[1], REFUSED))

    status, out, err = complete(run, server, other)

    assert (status, out) == (1, "a\n")
    vain = f"2 servers were asked in vain, the last, {other.url}"
    assert err == f"gptserve: {vain}: {other.url} computes another answer: {expected}\n"
    assert other.paths == ["/v1/completions", "/v1/completions/cmpl-1/cancel"], "nobody reads that one on"


def _first_then(server: StandIn, part: str, then: tuple[int, str]) -> Iterator[str]:
    yield part
    server.answer = then


def test_before_the_first_token_another_answer_is_as_good(run: Any, server: StandIn, other: StandIn) -> None:
    server.answer, other.answer = stream(event("", None, seed=8)), stream(event("a", "1"), DONE)

    assert complete(run, server, other) == (0, "a\n", "")
    assert other.asked_with[0][1] is None


def test_a_stream_without_ids_cannot_go_on(run: Any, server: StandIn, other: StandIn) -> None:
    server.answer = stream(event("a", None))

    expected = f"gptserve: {LOST}; its events have no ids, so no other server can go on\n"
    assert complete(run, server, other) == (1, "a\n", expected)
    assert other.asked == []


@pytest.mark.parametrize(
    ("first", "cancelled"), [(event("a", "1"), "cmpl-1"), ('data: {"choices": [{"text": ""}]}\n\n', "cmpl-2")]
)
def test_an_answer_that_is_left_is_cancelled_also_before_its_first_token(
    first: str, cancelled: str, server: StandIn, other: StandIn
) -> None:
    over = threading.Event()
    server.headers["x-gptserve-completion-id"] = "cmpl-2"

    def parts() -> Iterator[str]:
        yield first
        over.wait(LIMIT_S)

    server.answer = 200, parts()
    pieces = Replicas([server.url, other.url], None).stream("/v1/chat/completions", {})
    next(pieces)
    server.answer = 200, "{}"
    pieces.close()  # type: ignore[attr-defined]
    over.set()

    assert server.paths[1:] == [f"/v1/chat/completions/{cancelled}/cancel"]
