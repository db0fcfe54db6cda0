"""A server's place among those that share a database: who is alive by the database's clock, and has which completion.

It has a connection of its own, so that no client's work delays it. `store.py` makes one and asks for `me`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from uuid import UUID, uuid4

from psycopg import AsyncConnection

from gptserve.server.jobs.postgres import statements as sql
from gptserve.server.jobs.postgres.connections import Connections
from gptserve.server.jobs.sharing import FORGOTTEN_AFTER_S, Leases, SharedJob, Sharing


class Membership(Sharing):
    """The membership of this server; `me` is its id, and None before it joins and after it has left."""

    def __init__(self, own: Connections, others: Connections, ttl_s: float, limit_s: float) -> None:
        self._own = own
        self._others = others
        self._ttl_s = ttl_s
        self._limit_s = limit_s
        self.me: UUID | None = None

    @property
    def ttl_s(self) -> float:
        """How long a server that does not renew its membership keeps it, in seconds."""
        return self._ttl_s

    async def join(self) -> None:
        """Become a new member."""
        me = uuid4()

        async def insert(connection: AsyncConnection, _: bool) -> None:
            await connection.execute(f"{sql.JOIN} ON CONFLICT DO NOTHING", {"me": me, "ttl_s": self._ttl_s})

        await self._own.run(insert, self._limit_s)
        self.me = me

    async def leave(self) -> None:
        """Give up the membership with its leases."""
        if self.me is not None:
            await self._change(sql.LEAVE)
            self.me = None

    async def renew(self, fingerprints: Collection[str]) -> bool:
        """Renew the membership; return whether there still was one."""
        return await self._change(sql.RENEW, fingerprints=sorted(fingerprints)) == 1

    async def reap(self) -> int:
        """End the memberships that were not renewed in time; return their number."""
        return await self._change(sql.REAP)

    async def leases(self, fingerprints: Collection[str]) -> Leases:
        """Return the leases of this server, and whether some could be taken."""
        held = dict(await self._rows(self._own, sql.LEASES, **_claimable(fingerprints)))
        are_some_free = held.pop(None, False) is None
        return Leases(held, are_some_free)

    async def claim(self, fingerprints: Collection[str], limit: int) -> list[str]:
        """Take the leases of completions that nobody has; return their ids, the oldest first."""
        rows = await self._rows(self._own, sql.CLAIM, limit=limit, **_claimable(fingerprints))
        return [completion_id for _, completion_id in sorted(rows)]

    async def release(self, completion_ids: Iterable[str]) -> None:
        """Give up leases of this server."""
        await self._change(sql.RELEASE, ids=list(completion_ids))

    async def cancel(self, completion_id: str) -> None:
        """Ask for the end of a completion."""
        await self._change(sql.CANCEL, self._others, id=completion_id)  # a row that is locked delays no renewal

    async def ids(self) -> list[str]:
        """Return the ids of all completions."""
        return [completion_id for (completion_id,) in await self._rows(self._others, sql.IDS)]

    async def find(self, completion_ids: Collection[str]) -> list[SharedJob]:
        """Return the completions with these ids that exist."""
        return [*map(sql.to_shared, await self._rows(self._others, sql.FIND, ids=list(completion_ids)))]

    async def find_by_key(self, owner: str | None, key: str) -> SharedJob | None:
        """Return the completion that has an idempotency key of an owner."""
        rows = await self._rows(self._others, sql.FIND_BY_KEY, owner=owner, key=key)
        return sql.to_shared(rows[0]) if rows else None

    async def _rows(self, connections: Connections, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        async def select(connection: AsyncConnection, _: bool) -> list[tuple[Any, ...]]:
            cursor = await connection.execute(statement.encode(), {"me": self.me, **values})
            return await cursor.fetchall()

        return await connections.run(select, self._limit_s)

    async def _change(self, statement: str, connections: Connections | None = None, **values: Any) -> int:
        """Execute a statement that may be repeated; return the number of rows that it changed."""

        async def execute(connection: AsyncConnection, _: bool) -> int:
            return (await connection.execute(statement.encode(), {"me": self.me, **values})).rowcount

        return await (connections or self._own).run(execute, self._limit_s)


def _claimable(fingerprints: Collection[str]) -> dict[str, Any]:
    return {"fingerprints": list(fingerprints), "forgotten_after_s": FORGOTTEN_AFTER_S}
