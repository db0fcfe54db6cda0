"""Counts a server's connections and decides which idle ones to close.

It knows neither sockets nor HTTP. `server.py` asks before it accepts; `protocol.py` reports busy and idle connections.
"""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable

from gptserve.server.core.logs import RareWarning

PROBE_CONNECTIONS = 8  # a kubelet and two scrapers open one each now and then
# An idle server has about 20 open, with its engine, journal and listener. A restart of the engine needs 10 more for a
# moment, the connections of probes 8, and sockets that are being refused or closed need a few.
RESERVED_DESCRIPTORS = 64

logger = logging.getLogger(__name__)


class Connections:
    """The connections of one server: at most `limit`, and at most half of that idle.

    A connection is busy from the end of a request until the system has taken the whole answer. Otherwise it is idle:
    its TLS or its request is incomplete, or it is kept alive. Unauthenticated clients are almost always idle, as a
    request without a key is answered at once. A new connection replaces the longest idle one; when all are busy, there
    is no room for it.
    """

    probes_only = False
    _noun = "connections"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_refused = 0
        self.num_closed_idle = 0
        # How to drop each, the longest idle first.
        self._idle: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._busy: set[Hashable] = set()
        self._refusals = RareWarning(logger)
        self._closings = RareWarning(logger)

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def num_idle(self) -> int:
        """The number of connections without a running request."""
        return len(self._idle)

    def admit(self) -> bool:
        """Make room for one more connection and return whether there is room; count and log those closed for it."""
        if len(self._busy) >= self.limit:
            return False
        most_idle = max(1, self.limit // 2)
        while self._idle and (len(self._idle) >= most_idle or len(self) >= self.limit):
            _, drop = self._idle.popitem(last=False)
            self.num_closed_idle += 1
            self._closings.log(f"closing idle {self._noun}: {most_idle} may be idle and {self.limit} may be open")
            drop()
        return True

    def refuse(self) -> None:
        """Count and log a connection that is refused."""
        self.num_refused += 1
        self._refusals.log(f"refusing connections: all {self.limit} that may be open are busy")

    def set_idle(self, connection: Hashable, drop: Callable[[], object]) -> None:
        """Mark one as without a running request; `drop` hangs up. One that is idle keeps its place in the order."""
        self._busy.discard(connection)
        self._idle[connection] = drop

    def set_busy(self, connection: Hashable) -> None:
        """Mark one as with a running request."""
        self._idle.pop(connection, None)
        self._busy.add(connection)

    def remove(self, connection: Hashable) -> None:
        """Forget one."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)


class ProbeConnections(Connections):
    """Connections beyond the limit of the others: they serve probes and metrics only, one request each.

    So the server never looks dead because its clients hold all the connections that they may have.
    """

    probes_only = True
    _noun = "connections of probes"

    def __init__(self, others: Connections) -> None:
        super().__init__(PROBE_CONNECTIONS)
        self._others = others

    def refuse(self) -> None:
        """Count and log a connection for which the others have no room."""
        self._others.refuse()


def affordable_connections(wanted: int) -> int:
    """Raise the limit of open files to its maximum; return the number of connections it allows, at most `wanted`.

    Raises ValueError if it allows none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    affordable = hard - RESERVED_DESCRIPTORS
    if hard == resource.RLIM_INFINITY or affordable >= wanted:
        return wanted
    if affordable < 1:
        raise ValueError(f"the limit of open files (ulimit -n) must be over {RESERVED_DESCRIPTORS}, got {hard}")
    why = f"{hard} files may be open (ulimit -n), of which {RESERVED_DESCRIPTORS} are kept for other uses"
    logger.warning("max-connections is %d instead of %d: %s", affordable, wanted, why)
    return affordable
