"""A few connections to one PostgreSQL database, opened when they are needed, and with a limit on every wait.

A connection that fails, or only reads, is dropped, and the next use opens another, so nothing here has to notice that
the database is back. No use waits longer than its limit, whatever the network does: then its socket is shut down. Knows
no tables; `store.py` and `membership.py` call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.pq import PGconn, Ping

from gptserve.server.jobs.postgres.schema import ENCODING
from gptserve.server.jobs.store import JobStoreError, StoreUnavailableError

Result = TypeVar("Result")
Call = Callable[[AsyncConnection, bool], Awaitable[Result]]
"""Uses a connection; it is told whether an earlier use may have done the same, whose answer was lost."""

UNAVAILABLE = "the database of stored completions cannot be reached; requests that are not stored go on"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # between the attempts of a use that waits for the database
_QUIET_S = 60.0  # after a warning, as a database that only reads is back with each read

logger = logging.getLogger(__name__)


class Connections:
    """At most `size` connections. `settings` is SQL that each of them begins with.

    ttl_s is how long a network may leave what was sent without an acknowledgement. A use that gets no connection shares
    one of `spare`, as a database may have none left for this server but the first.
    """

    def __init__(self, url: str, size: int, settings: str, ttl_s: float, spare: Connections | None = None) -> None:
        milliseconds = str(round(ttl_s * 1000))
        self._defaults = {"application_name": "gptserve", "tcp_user_timeout": milliseconds, "keepalives_idle": "10"}
        self._url = url
        self._settings = settings
        self._spare = spare
        self._slots = asyncio.Semaphore(size)
        self._idle: list[AsyncConnection] = []
        self._uses: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self._is_down = False
        self._quiet_until = float("-inf")

    async def run(self, call: Call[Result], limit_s: float, patience_s: float = 0.0) -> Result:
        """Return what `call` does with a connection; each attempt may take limit_s.

        Attempts follow each other for patience_s while the database cannot be reached. If the caller is cancelled, the
        use goes on. Raises StoreUnavailableError, or JobStoreError for what the database refuses. ForeignKeyViolation
        and UniqueViolation are left to the caller.
        """
        if self._is_closed:
            raise JobStoreError("the journal is closed")
        use: asyncio.Task[Result] = asyncio.create_task(self._run(call, limit_s, patience_s))
        self._uses.add(use)
        use.add_done_callback(self._uses.discard)
        use.add_done_callback(lambda done: done.cancelled() or done.exception())  # a caller that has gone reads none
        return await asyncio.shield(use)

    async def close(self) -> None:
        """Close all connections after the uses that are under way. May be called twice."""
        self._is_closed = True
        while self._uses:
            await asyncio.wait(list(self._uses))
        while self._idle:
            await self._idle.pop().close()

    async def _run(self, call: Call[Result], limit_s: float, patience_s: float) -> Result:
        loop = asyncio.get_running_loop()
        give_up_at, pause_s, is_repeated = loop.time() + patience_s, _FIRST_PAUSE_S, False
        while True:
            try:
                result = await self._attempt(call, limit_s, is_repeated=is_repeated)
            except (psycopg.errors.ForeignKeyViolation, psycopg.errors.UniqueViolation):
                raise
            except _StaleError:
                is_repeated = True  # at once, with a new connection
            except (OSError, TimeoutError, psycopg.OperationalError, psycopg.InterfaceError, _READ_ONLY) as error:
                self._note_down(error)
                is_repeated = True
                if loop.time() + pause_s >= give_up_at or self._is_closed:
                    raise StoreUnavailableError(UNAVAILABLE) from error
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except (psycopg.Error, ValueError) as error:
                raise JobStoreError(f"the journal in PostgreSQL cannot be used: {cause_of(error)}") from error
            else:
                if self._is_down:
                    self._is_down = False
                    logger.info("the database of stored completions can be reached again")
                return result

    async def _attempt(self, call: Call[Result], limit_s: float, *, is_repeated: bool) -> Result:
        """Use a connection once; after limit_s shut its socket down, which ends the use at once."""
        lent: list[AsyncConnection] = []
        work: asyncio.Task[Result] = asyncio.create_task(self._use(call, lent, is_repeated=is_repeated))
        await asyncio.wait([work], timeout=limit_s)
        if not work.done():
            for connection in lent:
                _shut_down(connection)
            if not lent:
                work.cancel()
            await asyncio.wait([work])
            if work.cancelled() or work.exception() is not None:
                raise TimeoutError(f"no answer within {limit_s:g} s")
        return work.result()

    async def _use(self, call: Call[Result], lent: list[AsyncConnection], *, is_repeated: bool) -> Result:
        async with self._slots:
            is_new = not self._idle
            try:
                connection = await self._connect() if is_new else self._idle.pop()
            except psycopg.OperationalError as error:
                if self._spare is None:
                    raise
                result = await self._spare._use(call, lent, is_repeated=is_repeated)
                self._warn("all goes over one connection to the database, as no other can be opened", error)
                return result
            lent.append(connection)
            try:
                result = await call(connection, is_repeated)
            except psycopg.Error as error:
                if not connection.closed and not isinstance(error, _READ_ONLY):
                    self._idle.append(connection)
                    raise
                await connection.close()
                if not is_new:  # it may have been dead for long, as after a restart of the database, or only read
                    await self._drop_idle()
                    raise _StaleError from error
                raise
            except BaseException:
                await connection.close()
                raise
            self._idle.append(connection)
            return result

    async def _connect(self) -> AsyncConnection:
        connection = await AsyncConnection.connect(**self._defaults | parameters_of(self._url), autocommit=True)
        try:
            await connection.execute(self._settings.encode())
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    def _note_down(self, error: Exception) -> None:
        if not self._is_down and self._warn("the database of stored completions cannot be reached", error):
            self._is_down = True

    def _warn(self, what: str, error: Exception) -> bool:
        """Log a warning, unless there was one a moment ago; return whether it did."""
        if (now := time.monotonic()) < self._quiet_until:
            return False
        self._quiet_until = now + _QUIET_S
        logger.warning("%s: %s", what, cause_of(error))
        return True


class _StaleError(Exception):
    """A connection that was open had failed."""


_READ_ONLY = ReadOnlySqlTransaction  # a standby, whose primary the next attempt may find, or a full disk


def parameters_of(url: str) -> dict[str, Any]:
    """Return libpq's parameters for a database. Raises ValueError, without what may be of a password."""
    try:
        return {**conninfo_to_dict(url), "client_encoding": ENCODING}
    except psycopg.ProgrammingError as error:
        message = re.sub('".*"', '"***"', str(error)) if "password=" in url else str(error)
        raise ValueError(message) from None


def takes_connections(url: str) -> bool:
    """Return whether a server is there that says yes or no to a client. It blocks, for some seconds at most."""
    return PGconn.ping(make_conninfo(**parameters_of(url) | {"connect_timeout": "2"}).encode()) == Ping.OK


def cause_of(error: BaseException) -> str:
    """Return the first line of an error's message: libpq adds hints."""
    return (str(error) or repr(error)).splitlines()[0]


def _shut_down(connection: AsyncConnection) -> None:
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
