"""JSON in pieces of bounded size, so that no call of the C encoder holds the interpreter and the event loop for long.

Encodes whole answers and the events of streams; knows not what is in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Protocol

from starlette.responses import Response

from gptserve.server.core.errors import ServiceError
from gptserve.server.text.output import Delta

PIECE_ENTRIES = 64
"""Entries of an iterator that one call encodes; with 20 alternatives each they take about a millisecond."""


class StreamEncoder(Protocol):
    """Renders the events of one stream."""

    opening: str
    """What the stream opens with, before there are tokens."""
    keep_alive: bytes
    """What tells the client of a silent stream that it is not dead."""

    @property
    def num_entries(self) -> int:
        """How many entries the lists have that close the stream."""

    def chunk(self, index: int, delta: Delta, usage: dict[str, object] | None = None) -> str:
        """Return the events that add `delta` to a choice."""

    def end(self, usage: dict[str, object]) -> str:
        """Return what closes a stream that did not fail."""

    def error(self, error: ServiceError) -> str:
        """Return the event that ends a failed stream."""


class PiecewiseEncoder:
    """Encodes JSON without spaces. Pass a long list as an iterator, which is encoded slice by slice.

    Raises ValueError for NaN and infinity, which JSON does not have.
    """

    def __init__(self, *, ensure_ascii: bool) -> None:
        # Iterators inside a slice belong to one of its entries, and so are short.
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"), default=list)
        self.encode_short = encoder.encode
        """Returns the JSON of a value that has PIECE_ENTRIES at most, by one call: a third of the time."""

    def encode(self, value: object) -> str:
        """Return the JSON of `value`. Uses up its iterators."""
        return "".join(self.pieces(value))

    def pieces(self, value: object) -> Iterator[str]:
        """Yield the JSON of `value` in pieces, each the work of one call."""
        if isinstance(value, Mapping):
            yield from self._join("{}", ((f"{self.encode_short(name)}:", self.pieces(v)) for name, v in value.items()))
        elif isinstance(value, list):
            yield from self._join("[]", (("", self.pieces(entry)) for entry in value))
        elif isinstance(value, Iterator):
            slices = iter(lambda: list(islice(value, PIECE_ENTRIES)), [])
            yield from self._join("[]", (("", iter([self.encode_short(entries)[1:-1]])) for entries in slices))
        else:
            yield self.encode_short(value)

    @staticmethod
    def _join(brackets: str, members: Iterator[tuple[str, Iterator[str]]]) -> Iterator[str]:
        separator = brackets[0]
        for name, pieces in members:
            yield separator + name
            yield from pieces
            separator = ","
        yield brackets if separator == brackets[0] else brackets[1]


def json_response(answer: Mapping[str, object]) -> Response:
    """Return an answer as JSON."""
    return Response(PiecewiseEncoder(ensure_ascii=False).encode(answer).encode(), media_type="application/json")
