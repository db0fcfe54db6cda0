"""A running server, asked over HTTP by `gptserve complete` and `chat`; `replicas.py` asks one of several.

The server may be another than gptserve, and broken: what it sends is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptserve.server.cli.errors import CommandError

if TYPE_CHECKING:
    import httpx

MAX_LINE_BYTES = 2**20  # an event has a few tokens
ID_HEADER = "x-gptserve-completion-id"
KEY_HEADER, LAST_EVENT_HEADER = "idempotency-key", "last-event-id"
NO_CONTENT = 204
# Statuses with which another server may do better: it knows more, has room, or is there.
_ELSEWHERE = frozenset({404, 408, 429, 502, 503, 504})


class LostServerError(CommandError):
    """The server is gone, or says that it cannot answer now; another one may."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What an event adds to an answer."""

    text: str
    reasoning: str
    finish_reason: object


@dataclass(frozen=True, slots=True)
class Event:
    """A part of a stream: what it adds, one piece a choice, and what it says of the answer, null where it is silent.

    The first one is the head of the response, which adds nothing. `event_id` says what its reader then has.
    """

    pieces: tuple[Piece, ...] = ()
    event_id: str | None = None
    completion_id: object = None
    fingerprint: object = None
    seed: object = None


class Remote:
    """The server at a URL, with or without /v1 at its end. Whatever goes wrong is a CommandError.

    One that is silent for `silence_s` is lost; None waits for ever.
    """

    def __init__(self, url: str, key: str | None, silence_s: float | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._silence_s = silence_s  # a queued request may wait long for its first token

    def model_name(self) -> str:
        """Return the name of the model that is served."""
        with self._send("GET", "/v1/models", None) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise CommandError(f"{self.url} has no models, so it is not gptserve") from error

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[Piece]:
        """Yield the pieces of an answer until its end."""
        for event in self.events(path, body):
            yield from event.pieces

    def events(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> Iterator[Event]:
        """Yield the events of an answer until its end."""
        with self._send("POST", path, {**body, "stream": True}, headers) as response:
            yield Event(completion_id=response.headers.get(ID_HEADER))
            event_id = None
            for line in _lines(response):
                if line.startswith(b"id:"):
                    event_id = line.removeprefix(b"id:").strip().decode(errors="replace")
                elif line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield _event_of(data, event_id)
                    event_id = None
            if response.status_code == NO_CONTENT:
                return
            kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise CommandError(f"{self.url} answered with {kind or 'nothing known'} instead of events")
        raise LostServerError("the stream ended in the middle of the answer")

    def cancel(self, path: str, completion_id: str) -> None:
        """End a completion that would go on without its client."""
        with self._send("POST", f"{path}/{completion_id}/cancel", {}):
            pass

    @contextmanager
    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[httpx.Response]:
        """Give the response with its head; also translate the errors of reading it."""
        import httpx

        has_begun = False
        headers = {**self.headers, **(headers or {})}
        # A reader that has the last event already gets no content.
        good = (httpx.codes.OK, NO_CONTENT) if LAST_EVENT_HEADER in headers else (httpx.codes.OK,)
        try:
            with (
                _open_client(self._silence_s) as client,
                client.stream(method, self.url + path, json=body, headers=headers) as response,
            ):
                if response.status_code not in good:
                    message = _error_message(response.read()) or _describe_status(response)
                    raise LostServerError(message) if response.status_code in _ELSEWHERE else CommandError(message)
                has_begun = True
                yield response
        except (httpx.RequestError, httpx.InvalidURL) as error:
            if has_begun:
                raise LostServerError(f"the connection to {self.url} was lost: {error}") from error
            hint = "is `gptserve serve` running there?"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                hint = "SSL_CERT_FILE may name another file of certificates to trust"
            raise LostServerError(f"no answer from {self.url}: {error}; {hint}") from error


def _open_client(silence_s: float | None) -> httpx.Client:
    """Return a client that reaches this machine without the proxy of the environment."""
    import httpx

    direct = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
    timeout = httpx.Timeout(10.0, read=silence_s)
    try:
        return httpx.Client(timeout=timeout, mounts=direct)
    except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
        raise CommandError(f"a variable such as HTTPS_PROXY or SSL_CERT_FILE is wrong: {error}") from error


def _describe_status(response: httpx.Response) -> str:
    if response.has_redirect_location:
        return f"the server redirects to {response.headers['location']}"
    return f"the server answered with status {response.status_code} and no message"


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yield the lines. httpx would also end them at characters such as U+2028, which JSON may have as they are."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise CommandError(f"the server sent a line of more than {MAX_LINE_BYTES} bytes")


def _event_of(data: bytes, event_id: str | None) -> Event:
    """Return the event with this data. Raises CommandError for an error of the server and for odd events."""
    try:
        event = json.loads(data)
        if not event.get("error") and "choices" in event:
            pieces = tuple(map(_piece_of, event["choices"]))
            return Event(pieces, event_id, event.get("id"), event.get("system_fingerprint"), event.get("seed"))
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # one sentence for all that is odd
    message = _error_message(data)
    from gptserve.server.core.error_responses import codes_of  # only where it is too late for haste

    if message and _error_code(data) in codes_of(503):
        raise LostServerError(message)
    odd = f"the server sent an event that is no part of an answer: {data[:100].decode(errors='replace')!r}"
    raise CommandError(message or odd)


def _piece_of(choice: Any) -> Piece:
    added = choice.get("delta") or {"content": choice.get("text")}
    return Piece(_text(added.get("content")), _text(added.get("reasoning_content")), choice.get("finish_reason"))


def _text(value: Any) -> str:
    """Return a text, "" for null; half a surrogate pair, which no encoding has, becomes a question mark."""
    text: str = (value or "").encode(errors="replace").decode()
    return text


def _error_message(body: bytes) -> str:
    """Return the message of an error in one line, or "" if it has none."""
    try:
        return _find_message(json.loads(body))
    except (ValueError, RecursionError):
        return ""


def _error_code(body: bytes) -> object:
    """Return the code of gptserve's error with a message."""
    error = json.loads(body).get("error")
    return error.get("code") if isinstance(error, dict) else None


def _find_message(payload: Any) -> str:
    """Find it where servers put it: {"error": {"message": it}}, {"error": it}, {"message": it}, {"detail": it}."""
    for key in ("error", "message", "detail") if isinstance(payload, dict) else ():
        value = payload.get(key)
        if found := " ".join(_text(value).split()) if isinstance(value, str) else _find_message(value):
            return found
    return ""
