"""What clients ask of servers that are disturbed, how they follow it from one to another, and what they must get."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from gptserve.server.jobs.recorder import RESUMABLE
from tests.e2e.test_background import choices_of, is_over, last_id, without_comments
from tests.e2e.test_responses import without_ids
from tests.e2e.test_tools import TOOLS
from tests.server.api.test_background import check_ids
from tests.server.serving import Process

NUM_TOKENS = 200
_SAY = {"messages": [{"role": "user", "content": "Tell me a story about a fox named Mia."}]}
_LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
_NUMBERS = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _LIST}}
_OF_TOOL = {"type": "function", **TOOLS[0]["function"]}
_PAUSE_S = 0.1  # after a server could not be reached or refused
SHAPES: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time", "frequency_penalty": 0.5},
    {"prompt": "the fox the fox the fox the fox", "temperature": 0},  # drafts come true
    {"prompt": "A badger", "n": 3, "logprobs": 2},
    _SAY | {"n": 2, "logprobs": True, "top_logprobs": 1},
    _SAY | {"response_format": _NUMBERS},
    _SAY | {"tools": TOOLS, "tool_choice": "required", "temperature": 1.5},
    {"prompt": "x", "structured_outputs": {"regex": "(abc|xyz){40,}"}},
    {"input": "Tell me a story.", "ignore_eos": True},
    {"input": "Is it raining?", "tools": [_OF_TOOL], "tool_choice": "required", "temperature": 1.5},
)
Answer = list[Any]


def asked(number: int) -> dict[str, Any]:
    """Return the body of one completion or response."""
    shape, seed = SHAPES[number % len(SHAPES)], {"seed": number, "background": True}
    if "input" in shape:
        return {**shape, **seed, "max_output_tokens": NUM_TOKENS}
    ends = {} if {"response_format", "tools", "structured_outputs"} & shape.keys() else {"ignore_eos": True}
    return {**shape, **seed, **ends, "max_tokens": NUM_TOKENS}


def path_of(body: dict[str, Any]) -> str:
    if "input" in body:
        return "/v1/responses"
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def begin(client: httpx.AsyncClient, url: str, body: dict[str, Any], key: str) -> str | None:
    """Return the id of a completion that begins at a server, or None where it must be asked again."""
    try:
        response = await client.post(url + path_of(body), json=body, headers={"idempotency-key": key})
    except httpx.TransportError:
        return None
    if response.status_code in (429, 503):
        return None
    assert response.is_success, response.text
    return str(response.json()["id"])


class Reader:
    """A client that begins a completion and reads its events to the end, at one server after another.

    servers returns the URLs of those that are ready.
    """

    def __init__(
        self, client: httpx.AsyncClient, body: dict[str, Any], servers: Callable[[], list[str]], rng: random.Random
    ) -> None:
        self._client = client
        self._servers = servers
        self._rng = rng
        self._key = uuid.uuid4().hex
        self.body = body
        self.completion_id: str | None = None
        self.events: list[str] = []
        self.failure: str | None = None
        """What it was told that no other server says better."""

    @property
    def is_over(self) -> bool:
        """Whether it has read all, or never will."""
        return self.failure is not None or is_whole(self.events)

    async def run(self) -> None:
        """Begin it, wherever that is possible, and read to the end."""
        while self.completion_id is None:
            if urls := self._servers():
                self.completion_id = await begin(self._client, self._rng.choice(urls), self.body, self._key)
            await asyncio.sleep(_PAUSE_S)
        while not self.is_over:
            if urls := self._servers():
                await self._read(self._rng.choice(urls), self._rng.randrange(1, 60))
            await asyncio.sleep(_PAUSE_S)

    async def _read(self, url: str, num_events: int) -> None:
        """Read so many events, or those up to the end or to an error, which leads elsewhere."""
        path, headers = events_path(self.body, str(self.completion_id), self.events)
        if not headers and "starting_after" not in path:
            self.events.clear()
        limit, buffer = len(self.events) + num_events, ""
        try:
            async with self._client.stream("GET", url + path, headers=headers) as response:
                if response.status_code == 204:
                    self.events.append("data: [DONE]")
                elif response.status_code in (400, 404, 500):
                    self.failure = (await response.aread()).decode()
                elif response.status_code == 200:
                    async for text in response.aiter_text():
                        *blocks, buffer = (buffer + text).split("\n\n")
                        for event in without_comments(blocks):
                            if (error := error_in(event)) is not None:
                                self.failure = None if error["code"] in RESUMABLE else event
                                return
                            self.events.append(event)
                        if len(self.events) >= limit or self.is_over:
                            return
        except httpx.TransportError:
            return


def events_path(body: dict[str, Any], completion_id: str, had: list[str]) -> tuple[str, dict[str, str]]:
    """Return where the events after those that a client had are, with the headers that say so."""
    if "input" in body:
        after = f"&starting_after={sequence_number(had[-1])}" if had else ""
        return f"/v1/responses/{completion_id}?stream=true{after}", {}
    event_id = last_id(had)
    return f"/v1/completions/{completion_id}/events", {} if event_id is None else {"last-event-id": event_id}


def data_of(event: str) -> Any:
    return json.loads(event.partition("data: ")[2])


def sequence_number(event: str) -> int:
    return int(data_of(event)["sequence_number"])


def error_in(event: str) -> dict[str, Any] | None:
    """Return the error that ends a stream, whose completion may go on."""
    data = event.partition("data: ")[2]
    found = {} if data == "[DONE]" else json.loads(data)
    if found.get("type") == "error" or found.keys() == {"error"}:
        error: dict[str, Any] = found.get("error", found)
        return error
    return None


def is_whole(events: list[str]) -> bool:
    """Whether events are all of a completion or response."""
    if is_over(events):
        return True
    ends = ("response.completed", "response.incomplete", "response.failed")
    return bool(events) and '"sequence_number"' in events[-1] and data_of(events[-1])["type"] in ends


def answer_of(body: dict[str, Any], events: list[str]) -> Answer:
    """Return what cannot depend on when, where or beside whom a completion was computed, event by event."""
    parts = [data_of(event) for event in events] if "input" in body else choices_of(events)
    return [without_call_ids(without_ids(part)) for part in parts]


def without_call_ids(value: Any) -> Any:
    """Return a value without the ids of calls, which are drawn from that of the completion."""
    if isinstance(value, dict):
        return {name: without_call_ids(entry) for name, entry in value.items() if name != "call_id"}
    return [without_call_ids(entry) for entry in value] if isinstance(value, list) else value


async def whole_events(client: httpx.AsyncClient, url: str, body: dict[str, Any], completion_id: str) -> list[str]:
    """Return all events of a completion from a server that is not disturbed."""
    text = (await client.get(url + events_path(body, completion_id, [])[0], timeout=None)).text
    return without_comments(text.removesuffix("\n\n").split("\n\n"))


async def undisturbed(bodies: Sequence[dict[str, Any]], flags: Sequence[str]) -> list[Answer]:
    """Return the answers of a server that is left alone."""
    process = Process(*flags)
    try:
        ready = await asyncio.to_thread(process.wait_until_ready)
        url = str(ready.base_url)
        ready.close()
        async with httpx.AsyncClient(timeout=None) as client:
            ids = [await begin(client, url, body, uuid.uuid4().hex) for body in bodies]
            return [
                answer_of(body, await whole_events(client, url, body, str(completion_id)))
                for body, completion_id in zip(bodies, ids, strict=True)
            ]
    finally:
        process.kill()


async def compare(
    client: httpx.AsyncClient, url: str, readers: list[Reader], expected: list[Answer], wrong: list[str]
) -> None:
    """Add a sentence for each completion of which a reader, or this server, has not each event once as expected."""
    for reader, answer in zip(readers, expected, strict=True):
        name = f"{reader.completion_id} ({reader.body['seed']})"
        if reader.failure is not None:
            wrong.append(f"{name}: {reader.failure}")
            continue
        found = answer_of(reader.body, reader.events)
        if found != answer:
            wrong.append(f"{name}: {str(found)[-300:]} instead of {str(answer)[-300:]}")
        if reader.events != await whole_events(client, url, reader.body, str(reader.completion_id)):
            wrong.append(f"{name}: {url} shows other events than its reader had")
        if "input" not in reader.body:
            try:
                check_ids(reader.events[:-1])
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
        elif list(map(sequence_number, reader.events)) != list(range(len(reader.events))):
            wrong.append(f"{name}: its events are not numbered one by one")
