"""Counts a server's connections and decides which idle ones to close.

It knows neither sockets nor HTTP. `server.py` asks before it accepts; `protocol.py` reports busy and idle connections.
"""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from typing import Protocol

from gptserve.server.operations.logs import RareWarning

# An idle server has about 20 open, with its engine, journal and listener. A restart of the engine needs 10 more for a
# moment, and sockets that are being refused or closed need a few.
RESERVED_DESCRIPTORS = 64

logger = logging.getLogger(__name__)


class Peer(Protocol):
    """One accepted connection."""

    def hang_up(self) -> None:
        """Drop the connection at once."""


class Connections:
    """The connections of one server: at most `limit`, and at most half of that idle.

    A connection is busy from the end of a request until the system has taken the whole answer. Otherwise it is idle:
    its TLS or its request is incomplete, or it is kept alive. Strangers without a key are nearly always idle, as a
    request without a key is answered at once. A new connection replaces the longest idle one; when all are busy, it
    is refused.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_refused = 0
        self.num_closed_idle = 0
        self._idle: OrderedDict[Peer, None] = OrderedDict()  # the longest idle first
        self._busy: set[Peer] = set()
        self._refusals = RareWarning(logger)
        self._closings = RareWarning(logger)

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def num_busy(self) -> int:
        """The number of connections with a running request."""
        return len(self._busy)

    @property
    def num_idle(self) -> int:
        """The number of connections without a running request."""
        return len(self._idle)

    def admit(self) -> bool:
        """Make room for one more connection and return whether there is room; count and log closed and refused ones."""
        if len(self._busy) >= self.limit:
            self.num_refused += 1
            self._refusals.log(f"refusing connections: all {self.limit} that may be open are busy")
            return False
        most_idle = max(1, self.limit // 2)
        while self._idle and (len(self._idle) >= most_idle or len(self) >= self.limit):
            longest_idle, _ = self._idle.popitem(last=False)
            self.num_closed_idle += 1
            self._closings.log(f"closing idle connections: {most_idle} may be idle and {self.limit} may be open")
            longest_idle.hang_up()
        return True

    def set_idle(self, peer: Peer) -> None:
        """Mark it as without a running request. One that is already idle keeps its place in the order."""
        self._busy.discard(peer)
        self._idle[peer] = None

    def set_busy(self, peer: Peer) -> None:
        """Mark it as with a running request."""
        self._idle.pop(peer, None)
        self._busy.add(peer)

    def remove(self, peer: Peer) -> None:
        """Forget it."""
        self._idle.pop(peer, None)
        self._busy.discard(peer)


def affordable_connections(wanted: int) -> int:
    """Raise the limit of open files to its maximum; return the number of connections it allows, at most `wanted`.

    Raises ValueError if it allows none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard - RESERVED_DESCRIPTORS >= wanted:
        return wanted
    affordable = hard - RESERVED_DESCRIPTORS
    if affordable < 1:
        raise ValueError(f"the limit of open files (ulimit -n) must be over {RESERVED_DESCRIPTORS}, got {hard}")
    logger.warning(
        "max-connections is %d instead of %d: %d files may be open (ulimit -n), of which %d are kept for other uses",
        affordable,
        wanted,
        hard,
        RESERVED_DESCRIPTORS,
    )
    return affordable
