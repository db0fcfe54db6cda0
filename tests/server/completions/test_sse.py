from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from gptserve.server.completions.encoding import PiecewiseEncoder
from gptserve.server.completions.shapes import CHAT_SHAPE, TEXT_SHAPE
from gptserve.server.completions.sse import AFTER_KEEP_ALIVE, DONE, KEEP_ALIVE, Connection, EventEncoder
from gptserve.server.core.errors import ServiceError
from gptserve.server.schemas.completions import ChatCompletionChunk, Completion
from gptserve.server.text.output import Delta, TokenScore

HEAD = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": 'a "model"',
    "system_fingerprint": "f",
    "batch_invariant": True,
    "seed": 5,
}
CHAT_HEAD = {**HEAD, "id": "chatcmpl-1", "object": "chat.completion.chunk"}
USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}
LOGPROBS = [TokenScore(b"a", 0, -0.5, ((b"a", -0.5),))]
DELTAS = [
    Delta("a"),
    Delta('"\n\\é\u2028😀\0'),
    Delta("", LOGPROBS),
    Delta("x", None, "stop", "END"),
    Delta("x", None, "stop", 7),
    Delta("", None, "length"),
]


def sent(value: object) -> Any:
    """Return `value` as a client parses it."""
    return json.loads(PiecewiseEncoder(ensure_ascii=True).encode(value))


def data_of(event: str) -> dict[str, Any]:
    """Return the data of an event, after checking its frame."""
    assert event.endswith("\n\n")
    *_, data = event[:-2].split("\n")
    assert data.startswith("data: ")
    parsed: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return parsed


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("usage", [None, USAGE])
@pytest.mark.parametrize("delta", DELTAS)
def test_a_chunk_is_a_completion(delta: Delta, usage: dict[str, Any] | None, include_usage: bool) -> None:
    event = EventEncoder(HEAD, TEXT_SHAPE, 4, include_usage=include_usage).chunk(3, delta, usage)
    data = data_of(event)
    expected = {**HEAD, "choices": [sent(TEXT_SHAPE.part(3, delta))]}
    if usage or include_usage:
        expected["usage"] = usage
    assert data == expected
    assert list(data) == list(expected)
    Completion.model_validate(data, strict=True, extra="forbid")


@pytest.mark.parametrize("usage", [None, USAGE])
@pytest.mark.parametrize("delta", [*DELTAS, Delta("", reasoning="r"), Delta("x", reasoning="r")])
def test_a_chats_first_chunk_opens_all_choices(delta: Delta, usage: dict[str, Any] | None) -> None:
    encoder = EventEncoder(CHAT_HEAD, CHAT_SHAPE, 2, include_usage=False)
    extra = {"usage": usage} if usage else {}
    before = {"usage": {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}} if usage else {}
    *openings, first, end = encoder.chunk(1, delta, usage).split("\n\n")
    assert CHAT_SHAPE.opening is not None
    for index, opening in enumerate(openings):
        assert data_of(opening + "\n\n") == {**CHAT_HEAD, "choices": [sent(CHAT_SHAPE.opening(index))], **before}
    assert data_of(first + "\n\n") == {**CHAT_HEAD, "choices": [sent(CHAT_SHAPE.part(1, delta))], **extra}
    assert (len(openings), end) == (2, "")
    data = data_of(encoder.chunk(0, delta, usage))
    assert data == {**CHAT_HEAD, "choices": [sent(CHAT_SHAPE.part(0, delta))], **extra}
    ChatCompletionChunk.model_validate(data, strict=True, extra="forbid")


@pytest.mark.parametrize("is_resumable", [True, False])
def test_events_are_ascii_lines_and_those_of_a_resumable_stream_have_ids(is_resumable: bool) -> None:
    ids = iter(["1.0", "1.1", "1.1"])
    event_id = ids.__next__ if is_resumable else None
    encoder = EventEncoder(HEAD, TEXT_SHAPE, 2, include_usage=True, event_id=event_id)
    events = [encoder.chunk(0, Delta("\u2028\x85é")), encoder.chunk(1, Delta("b"))]
    last, done, end = encoder.end(USAGE).partition(DONE)
    assert (done, end) == (DONE, "")
    events.append(last)
    for expected, event in zip(("1.0", "1.1", "1.1.end"), events, strict=True):
        assert event.isascii()
        lines = event.splitlines()  # splits at every separator that some client splits at
        assert lines[:-2] == ([f"id: {expected}"] if is_resumable else [])
        assert lines[-2].startswith("data: ")
        assert lines[-1] == ""
    assert data_of(events[-1]) == {**HEAD, "choices": [], "usage": USAGE}


def test_an_error_event_has_no_id() -> None:
    event = EventEncoder(HEAD, TEXT_SHAPE, 4, include_usage=False).error(ServiceError("cancelled", "m"))
    told = {"message": "m", "type": "invalid_request_error", "param": None, "code": "cancelled"}
    assert event == f"data: {json.dumps({'error': told}, separators=(',', ':'))}\n\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_an_error_not_a_chunk(value: float) -> None:
    encoder = EventEncoder(HEAD, TEXT_SHAPE, 4, include_usage=False)
    with pytest.raises(ValueError, match="not JSON compliant"):
        encoder.chunk(0, Delta("a", [TokenScore(b"a", 0, value, ())]))


def test_a_silent_stream_gets_comments_until_the_client_goes() -> None:
    async def scenario() -> list[bytes]:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: asyncio.Queue[bytes] = asyncio.Queue()
        gone = asyncio.Event()

        async def send(message: Any) -> None:
            if "body" in message:
                sent.put_nowait(message["body"])

        async with Connection(messages.get, send, gone.set, keep_alive_s=0.01) as connection:  # type: ignore[arg-type]
            await connection.write(b"first")
            seen = [await asyncio.wait_for(sent.get(), 20) for _ in range(3)]
            await connection.write(b"last")
            while not seen[-1].endswith(b"last"):
                seen.append(await asyncio.wait_for(sent.get(), 20))
            assert not connection.is_gone
            messages.put_nowait({"type": "http.request", "body": b"late"})
            messages.put_nowait({"type": "http.disconnect"})
            await asyncio.wait_for(gone.wait(), 20)
            assert connection.is_gone
        return seen

    first, comment, *others, last = asyncio.run(scenario())
    assert (first, comment, last) == (b"first", KEEP_ALIVE, AFTER_KEEP_ALIVE + b"last")
    assert set(others) == {AFTER_KEEP_ALIVE + KEEP_ALIVE}


def test_leaving_the_connection_ends_its_watch() -> None:
    async def scenario() -> None:
        async def send(_message: Any) -> None:
            raise AssertionError("nothing is sent")

        async def receive() -> Any:
            await asyncio.Event().wait()

        async with Connection(receive, send, lambda: None) as connection:
            assert len(asyncio.all_tasks()) == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not connection.is_gone

    asyncio.run(scenario())


def test_the_events_that_open_a_chat_have_no_id_and_are_left_out_for_a_client_that_has_tokens() -> None:
    def render(is_open: bool) -> list[str]:
        encoder = EventEncoder(CHAT_HEAD, CHAT_SHAPE, 2, include_usage=False, event_id=lambda: "7.7", is_open=is_open)
        return encoder.chunk(0, Delta("a")).split("\n\n")[:-1]

    *openings, first = render(False)
    assert [opening.startswith("data: ") for opening in openings] == [True, True]
    assert first.startswith("id: 7.7\n")
    assert render(True) == [first]


def test_a_client_that_goes_while_a_write_waits_for_it_is_noticed() -> None:
    async def run() -> list[bytes]:
        sent: list[bytes] = []
        is_gone, noticed, heard_often, never = (asyncio.Event() for _ in range(4))
        num_heard = 0

        async def send(message: Message) -> None:
            if "body" not in message:
                return
            sent.append(message["body"])
            await never.wait()

        async def receive() -> Message:
            nonlocal num_heard
            num_heard += 1
            if num_heard == 3:
                heard_often.set()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async with asyncio.timeout(20), Connection(receive, send, noticed.set, keep_alive_s=0.001) as connection:
            write = asyncio.create_task(connection.write(b"event"))
            await heard_often.wait()  # it was silent twice, and listens
            is_gone.set()
            await noticed.wait()
            write.cancel()
        return sent

    assert asyncio.run(run()) == [b"event"]
