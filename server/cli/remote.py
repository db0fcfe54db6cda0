"""A running server, asked over HTTP by `gptserve complete` and `gptserve chat`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gptserve.server.cli.errors import CommandError

if TYPE_CHECKING:
    import httpx


class Remote:
    """The server at a URL, with or without /v1 at its end. Whatever goes wrong is a CommandError."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def model_name(self) -> str:
        """Return the name of the model that is served."""
        with self._send("GET", "/v1/models", None) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise CommandError(f"{self.url} has no models, so it is not gptserve") from error

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Yield the events of an answer until its end."""
        with self._send("POST", path, {**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise CommandError(event["error"]["message"])
                    yield event
        raise CommandError("the stream ended in the middle of the answer")

    @contextmanager
    def _send(self, method: str, path: str, body: Mapping[str, object] | None) -> Iterator[httpx.Response]:
        """Give the response with its head; also translate the errors of reading it."""
        import httpx

        has_begun = False
        timeout = httpx.Timeout(10.0, read=None)  # a queued request may wait long for its first token
        try:
            with httpx.stream(method, self.url + path, json=body, headers=self._headers, timeout=timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise CommandError(_error_message(response.status_code, response.read()))
                has_begun = True
                yield response
        except (httpx.RequestError, httpx.InvalidURL) as error:
            if has_begun:
                raise CommandError(f"the connection to {self.url} was lost: {error}") from error
            raise CommandError(f"no answer from {self.url}: {error}; is `gptserve serve` running there?") from error


def _error_message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status} and no message"
