"""Several servers that compute the same, asked as one: an answer that loses its server goes on at another.

A completion is a function of its inputs, and each event's id says what its reader has. So the answer is asked for again
with the same Idempotency-Key and that id, of the next server that answers, which need not know of it. `main.py` makes
one where there are several URLs.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gptserve.server.cli.errors import CommandError
from gptserve.server.cli.remote import KEY_HEADER, LAST_EVENT_HEADER, Event, LostServerError, Piece, Remote

SILENCE_S = 60.0  # four times the default --sse-keep-alive-interval: a machine that is gone says nothing

PATIENCE_S = 15.0
"""For how long an answer that has begun waits for a server: a router may take some seconds to see that one is gone."""
PAUSE_S = 0.5  # before all are asked again


class Replicas:
    """Servers with one model, at least one. It stays at one of them for as long as that one answers."""

    def __init__(self, urls: Sequence[str], key: str | None) -> None:
        self._remotes = [Remote(url, key, SILENCE_S) for url in urls]
        self._at = 0

    @property
    def url(self) -> str:
        """The URL of the server that answers."""
        return self._remotes[self._at].url

    def model_name(self) -> str:
        """Return the name of the model that is served. Raises CommandError."""
        for num_lost in range(1, len(self._remotes) + 1):
            try:
                return self._remotes[self._at].model_name()
            except LostServerError as error:
                self._leave(error, num_lost)
        raise AssertionError("the last one raises")

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[Piece]:
        """Yield the pieces of an answer until its end; one that is left before its end is cancelled.

        Raises CommandError, also if no server can go on where the last one ended.
        """
        reading, num_lost, patient_until = _Reading(uuid.uuid4().hex), 0, 0.0
        while True:
            remote = self._remotes[self._at]
            try:
                for event in remote.events(path, body, reading.headers()):
                    reading.note(event, remote.url)
                    yield from event.pieces
                    num_lost = 0 if event.event_id is not None else num_lost
                return
            except LostServerError as error:
                if num_lost == 0 and reading.has_begun:
                    patient_until = time.monotonic() + PATIENCE_S
                if isinstance(error, _OtherAnswerError):
                    patient_until = 0.0
                    reading.cancel(remote, path)
                if reading.has_text and reading.event_id is None:
                    raise CommandError(f"{error}; its events have no ids, so no other server can go on") from error
                num_lost += 1
                self._leave(error, num_lost, patient_until)
            except (GeneratorExit, KeyboardInterrupt):
                reading.cancel(remote, path)
                raise

    def _leave(self, error: LostServerError, num_lost: int, patient_until: float = 0.0) -> None:
        """Go to the next server, after a pause once all have been asked. Raises CommandError if it is too late."""
        if num_lost >= len(self._remotes):
            if time.monotonic() + PAUSE_S > patient_until:
                vain = f"{len(self._remotes)} servers were asked in vain, the last, {self.url}"
                raise CommandError(f"{vain}: {error}") from error
            time.sleep(PAUSE_S)
        self._at = (self._at + 1) % len(self._remotes)


class _OtherAnswerError(LostServerError):
    """The server answers, and its answer is another one."""


@dataclass(slots=True)
class _Reading:
    """What the reader of an answer has: the id of its last event, and what makes the answer what it is."""

    key: str
    event_id: str | None = None
    has_begun: bool = False
    has_text: bool = False
    completion_id: object = None
    made_by: tuple[object, object] | None = None
    """The fingerprint of what computes the answer, and its seed; they are known once there is an event id."""

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for what follows."""
        self.completion_id = None
        after = {} if self.event_id is None else {LAST_EVENT_HEADER: self.event_id}
        return {KEY_HEADER: self.key} | after

    def note(self, event: Event, url: str) -> None:
        """Note an event. Raises LostServerError if it belongs to another answer."""
        self.has_begun = True
        self.completion_id = event.completion_id or self.completion_id
        if not event.pieces and event.event_id is None:
            return
        made_by = event.fingerprint, event.seed
        for name, now, before in zip(("system_fingerprint", "seed"), made_by, self.made_by or made_by, strict=True):
            if now != before:
                raise _OtherAnswerError(f"{url} computes another answer: its {name} is {now}, not {before}")
        self.has_text = self.has_text or any(piece.text or piece.reasoning for piece in event.pieces)
        if event.event_id is not None:
            self.event_id, self.made_by = event.event_id, made_by

    def cancel(self, remote: Remote, path: str) -> None:
        """End the completion, which would go on without its reader; a server that is gone needs no word."""
        if isinstance(self.completion_id, str):
            with contextlib.suppress(CommandError):
                remote.cancel(path, self.completion_id)
