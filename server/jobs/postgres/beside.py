"""What the stores of files and of batches need of the database of stored completions.

They have connections of their own, so that large files delay no completion, and write as the same member. `store.py`
makes one. Knows no tables.
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import ForeignKeyViolation as ForeignKeyViolation

from gptserve.server.jobs.postgres.connections import Connections
from gptserve.server.jobs.postgres.membership import Membership

Row = tuple[Any, ...]


class Beside:
    """Executes statements, each in a transaction of its own, within limit_s; `%(me)s` in one is this server's id."""

    def __init__(self, connections: Connections, membership: Membership, limit_s: float) -> None:
        self._connections, self._membership, self._limit_s = connections, membership, limit_s

    async def rows(self, statement: str, patience_s: float = 0.0, **values: Any) -> list[Row]:
        """Return the rows of a statement, which may be made twice. Raises JobStoreError or ForeignKeyViolation."""

        async def execute(connection: AsyncConnection, _: bool) -> list[Row]:
            cursor = await connection.execute(statement.encode(), values | {"me": self._membership.me}, binary=True)
            return await cursor.fetchall()

        return await self._connections.run(execute, self._limit_s, patience_s)

    async def close(self) -> None:
        """Close the connections after the statements that are under way. May be called twice."""
        await self._connections.close()
