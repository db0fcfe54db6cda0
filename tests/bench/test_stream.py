"""What a client notes of one streamed answer: exact times of a clock that the server moves, and every failure."""

from __future__ import annotations

import asyncio

import pytest

from bench.load import Load
from bench.stream import Outcome
from tests.bench.stand_in import (
    DONE,
    END,
    OK,
    Clock,
    Request,
    bodies,
    chunk,
    event,
    token,
    usage,
    with_server,
)

Part = tuple[float, str]


def outcome_of(*parts: Part, hangs_up: bool = False) -> Outcome:
    """Return what a client notes of an answer of these parts."""

    async def use(load: Load, requests: asyncio.Queue[Request], _: Clock) -> Outcome:
        task = asyncio.create_task(load.closed_loop(bodies(3), 1))
        request = await requests.get()
        await request.send(*parts)
        if hangs_up:
            request.hang_up()
        [outcome] = await task
        request.hang_up()
        return outcome

    found: Outcome = with_server(use)
    return found


def test_times_count_from_the_request_to_each_event_with_a_token() -> None:
    outcome = outcome_of(
        (0.5, OK),
        (1.0, chunk(token("a"))),
        (0.25, chunk(": keep-alive\n\n")),
        (0.25, chunk(token(""))),  # half of a character is a token, too
        (2.0, chunk(token("é")) + chunk(token("b", finish_reason="length"))),
        (8.0, chunk(usage(7, 4, prompt_tokens_details={"cached_tokens": 5}), DONE) + END),
    )

    assert (outcome.failure, outcome.ttft, outcome.itl, outcome.e2e) == (None, 1.5, [0.5, 2.0, 0.0], 4.0)
    assert (outcome.num_tokens, outcome.num_prompt_tokens, outcome.num_cached_tokens) == (4, 7, 5)
    assert outcome.mean_itl == 2.5 / 3


def test_an_event_has_come_when_its_last_byte_has() -> None:
    data = token("é")
    outcome = outcome_of(
        (0.0, OK), (1.0, chunk(data[:20]) + chunk(data[20:30])), (1.0, chunk(data[30:])), (0.0, chunk(DONE))
    )

    assert (outcome.failure, outcome.arrivals) == (None, [2.0])


def test_an_event_of_its_own_for_the_reason_of_the_end_is_no_token() -> None:
    outcome = outcome_of(
        (0.0, OK),
        *[(1.0, chunk(token()))] * 2,
        (1.0, chunk(token("", finish_reason="length"), usage(1, 2), DONE)),
    )

    assert (outcome.failure, outcome.arrivals) == (None, [1.0, 2.0])


@pytest.mark.parametrize("more", ["", event({"choices": [], "usage": None})])
def test_without_usage_the_number_of_tokens_is_unknown(more: str) -> None:
    outcome = outcome_of((0.0, OK), (1.0, chunk(token(), token(), more, DONE)))

    assert (outcome.failure, outcome.num_tokens, outcome.arrivals) == (None, None, [1.0, 1.0])


def test_a_body_without_length_ends_with_its_last_event() -> None:
    assert outcome_of((0.0, "HTTP/1.0 200 OK\r\n\r\n"), (1.0, token() + DONE), hangs_up=True).failure is None


def error(status: str, body: str) -> Part:
    return 0.0, f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}"


BUSY = '{"error": {"message": "try later", "type": "overloaded_error", "code": "queue_full"}}'
FOREIGN = '{"error": {"message": "no such field", "type": "invalid_request_error", "code": 400}}'


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([error("429 Too Many", BUSY)], ("status 429, queue_full", "try later")),
        ([error("400 Bad", FOREIGN)], ("status 400, invalid_request_error", "no such field")),
        ([error("502 Bad", "<html>")], ("status 502", "<html>")),
        ([error("500 Bad", '{"error": "broken"}')], ("status 500", '{"error": "broken"}')),
        ([error("404 Not Found", "[]")], ("status 404", "[]")),
        ([(0.0, OK), (0.0, chunk(token(), event(BUSY)))], ("error event, queue_full", "try later")),
        ([(0.0, OK), (0.0, chunk(token()) + END)], ("cut short", "")),
        ([(0.0, OK), (0.0, chunk(usage(1, 0), DONE))], ("no token", "")),
        ([(0.0, OK), (0.0, chunk("data: {\n"))], ("not a stream of completions", "Expecting property name")),
        ([(0.0, OK), (0.0, chunk("data: 1\n"))], ("not a stream of completions", "'int' object has no attribute")),
        ([(0.0, "SSH-2.0-server\r\n")], ("not a stream of completions", "Expected HTTP/")),
    ],
)
def test_an_answer_that_fails_says_how(parts: list[Part], expected: tuple[str, str]) -> None:
    outcome = outcome_of(*parts)

    assert outcome.failure == expected[0]
    assert outcome.message.startswith(expected[1])


def test_an_error_without_length_ends_with_the_connection() -> None:
    outcome = outcome_of((0.0, f"HTTP/1.0 429 Too Many\r\n\r\n{BUSY}"), hangs_up=True)

    assert (outcome.failure, outcome.message) == ("status 429, queue_full", "try later")


@pytest.mark.parametrize("parts", [[], [(0.0, OK)], [(0.0, OK), (0.0, chunk(token())[:-9])]])
def test_a_connection_that_is_lost_is_an_answer_cut_short(parts: list[Part]) -> None:
    assert outcome_of(*parts, hangs_up=True).failure == "cut short"
