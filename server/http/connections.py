"""How many connections a server has, which of them are idle, and which must go.

It knows neither sockets nor HTTP. `http_server.py` asks it before it accepts, `protocol.py` tells it what a connection
does.
"""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from typing import Protocol

from gptserve.server.operations.logs import RareWarning

# An idle server has about 20 open, with its engine, journal and listener. A restart of the engine takes 10 more for a
# moment, a second of accepted sockets that are refused or closed a few.
RESERVED_DESCRIPTORS = 64

logger = logging.getLogger(__name__)


class Peer(Protocol):
    """One connection, from its being accepted on."""

    def hang_up(self) -> None:
        """Drop the connection at once."""


class Connections:
    """The connections of one server: at most `limit`, and at most half of that idle.

    A connection is busy from the end of a request until the system has taken all of the answer; otherwise it is idle:
    its TLS or its request is not complete, or it is kept alive. A stranger without a key can hardly be anything else:
    a complete request without one is answered at once. Idle ones make room for new ones, the longest idle first; when
    all are busy, new ones are refused.
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
        """How many have a request under way."""
        return len(self._busy)

    @property
    def num_idle(self) -> int:
        """How many have no request under way."""
        return len(self._idle)

    def admit(self) -> bool:
        """Return whether there is room for one more, having made some if need be; count and log what had to be done."""
        if len(self._busy) >= self.limit:
            self.num_refused += 1
            self._refusals.log(f"refusing connections: all {self.limit} that may be open have a request under way")
            return False
        most_idle = max(1, self.limit // 2)
        while self._idle and (len(self._idle) >= most_idle or len(self) >= self.limit):
            longest_idle, _ = self._idle.popitem(last=False)
            self.num_closed_idle += 1
            self._closings.log(f"closing idle connections: {most_idle} may be idle and {self.limit} may be open")
            longest_idle.hang_up()
        return True

    def set_idle(self, peer: Peer) -> None:
        """Note that it has no request under way; one that is idle already does not become newer by that."""
        self._busy.discard(peer)
        self._idle[peer] = None

    def set_busy(self, peer: Peer) -> None:
        """Note that it has a request under way."""
        self._idle.pop(peer, None)
        self._busy.add(peer)

    def remove(self, peer: Peer) -> None:
        """Forget it."""
        self._idle.pop(peer, None)
        self._busy.discard(peer)


def affordable_connections(wanted: int) -> int:
    """Raise the limit of open files as far as it goes and return how many connections it allows, at most `wanted`.

    Raises ValueError where it allows none.
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
