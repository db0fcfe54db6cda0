"""Every order of what servers do to one completion, and every two of them at once, stepped by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest

from gptserve.server.jobs.postgres import statements as sql
from gptserve.server.jobs.postgres.store import PostgresJobStore
from gptserve.server.jobs.sharing import FORGOTTEN_AFTER_S
from tests.server.jobs.test_store import END, RECORD

pytestmark = pytest.mark.slow

SILENT, OTHER = UUID(int=1), UUID(int=2)
ID = RECORD.completion_id
BATCH = {"ids": [ID], "ns": [1], "outputs": ["[]"], "bytes": [2], "tokens": [0], "me": SILENT}
FAILED = sql.end_columns([(ID, replace(END, status="failed", error="{}"))]) | {"me": SILENT}
CLAIM = {"me": OTHER, "fingerprints": [RECORD.fingerprint], "limit": 9, "forgotten_after_s": FORGOTTEN_AFTER_S}
WRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "append": (sql.APPEND, BATCH),
    "end": (sql.END, FAILED),
    "reap": (sql.REAP, {}),
    "claim": (sql.CLAIM, CLAIM),
    "cancel": (sql.CANCEL, {"id": ID}),
    "delete": (sql.FORGET, {"ids": [ID]}),
}
"""The first two are of a server that has been silent for too long and has the completion, the others of another."""
SKIPPING = {"reap", "claim"}  # they pass over what another holds
RESET = f"""
DELETE FROM gptserve.completions;
DELETE FROM gptserve.replicas;
INSERT INTO gptserve.replicas VALUES ('{SILENT}', clock_timestamp() - interval '1 hour', 1),
    ('{OTHER}', clock_timestamp(), 3600);
"""
REST = f"""
INSERT INTO gptserve.keys VALUES ('{RECORD.owner}', '{RECORD.key}', '{ID}');
INSERT INTO gptserve.leases VALUES ('{ID}', '{RECORD.fingerprint}', 0, '{SILENT}');
INSERT INTO gptserve.batches VALUES ('{ID}', 0, '[]', 2, 0);
"""
STATE = """
SELECT EXISTS (SELECT FROM gptserve.completions), EXISTS (SELECT FROM gptserve.keys),
    ARRAY(SELECT id FROM gptserve.replicas ORDER BY id), ARRAY(SELECT n FROM gptserve.batches ORDER BY n),
    ARRAY(SELECT (replica, is_cancelled)::text FROM gptserve.leases), ARRAY(SELECT status FROM gptserve.ends)
"""
WAITS = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def connections(postgres_url: str) -> Iterator[tuple[Connection, Connection, Connection]]:
    """Three connections to a database with the tables."""

    async def make() -> None:
        store = PostgresJobStore(postgres_url)
        await store.open()
        await store.close()

    asyncio.run(make())
    with (
        psycopg.connect(postgres_url, autocommit=True) as one,
        psycopg.connect(postgres_url, autocommit=True) as other,
        psycopg.connect(postgres_url, autocommit=True) as third,
    ):
        yield one, other, third


def reset(connection: Connection, *, is_free: bool = False) -> None:
    """Let there be a completion with one batch, whose server is silent, or which no server has."""
    connection.execute(RESET.encode())
    connection.execute(sql.INSERT.encode(), sql.completion_row(RECORD))
    connection.execute(REST.encode())
    if is_free:
        connection.execute("UPDATE gptserve.leases SET replica = NULL")


def write(connection: Connection, name: str) -> int:
    """Return how many rows a write returns or changes; none where what it belongs to has been deleted meanwhile."""
    statement, values = WRITES[name]
    try:
        return connection.execute(statement.encode(), values).rowcount
    except psycopg.errors.ForeignKeyViolation:
        return 0


def state(connection: Connection) -> tuple[Any, ...]:
    row = connection.execute(STATE.encode()).fetchone()
    assert row is not None
    return row


class Model:
    """What the writes must do, each as a whole."""

    def __init__(self) -> None:
        self.exists = self.has_key = True
        self.replicas = [SILENT, OTHER]
        self.batches = [0]
        self.leases: list[tuple[UUID | None, bool]] = [(SILENT, False)]
        self.ends: list[str] = []

    @property
    def _is_fenced(self) -> bool:
        return SILENT not in self.replicas or not self.leases or self.leases[0][0] != SILENT

    def write(self, name: str) -> int:
        return int(getattr(self, name)())

    def append(self) -> bool:
        if self._is_fenced:
            return False
        self.batches.append(1)
        return True

    def end(self) -> bool:
        if self._is_fenced:
            return False
        self.leases, self.ends, self.has_key = [], ["failed"], False
        return True

    def reap(self) -> bool:
        self.replicas.remove(SILENT)
        self.leases = [(None if holder == SILENT else holder, order) for holder, order in self.leases]
        return True

    def claim(self) -> bool:
        if not self.leases or self.leases[0][0] is not None:
            return False
        self.leases = [(OTHER, self.leases[0][1])]
        return True

    def cancel(self) -> bool:
        self.leases = [(holder, True) for holder, _ in self.leases]
        return bool(self.leases)

    def delete(self) -> bool:
        self.exists = self.has_key = False
        self.batches, self.leases, self.ends = [], [], []
        return True

    def state(self) -> tuple[Any, ...]:
        leases = [f"({holder or ''},{'t' if order else 'f'})" for holder, order in self.leases]
        return self.exists, self.has_key, self.replicas, self.batches, leases, self.ends


def test_in_every_order_each_write_does_what_its_server_may(
    connections: tuple[Connection, Connection, Connection],
) -> None:
    connection, *_ = connections
    connection.execute("SET synchronous_commit = off")
    for order in itertools.permutations(WRITES):
        reset(connection)
        model = Model()
        for name in order:
            assert write(connection, name) == model.write(name), (order, name)
        assert state(connection) == model.state(), order


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("first", WRITES)
def test_any_two_at_once_do_as_one_after_the_other(
    connections: tuple[Connection, Connection, Connection], first: str, is_free: bool
) -> None:
    """The first is held before it commits, or is rolled back, while the second runs as far as it can."""
    one, other, third = connections
    for second, commits in itertools.product(WRITES, (True, False)):
        allowed = []
        for order in ([first, second], [second, first]) if commits else ([second],):
            reset(one, is_free=is_free)
            results = [(name, write(one, name)) for name in order]
            allowed.append((sorted(results), state(one)))
        if second in SKIPPING and commits:
            reset(one, is_free=is_free)
            allowed.append((sorted([(first, write(one, first)), (second, 0)]), state(one)))
        reset(one, is_free=is_free)
        found = overlap(one, other, third, first, second, commits=commits)
        if second in SKIPPING and not commits:
            reset(one, is_free=is_free)
            allowed.append(([(second, 0)], state(one)))
        assert found in allowed, (first, second, commits)


def overlap(
    one: Connection, other: Connection, third: Connection, first: str, second: str, *, commits: bool
) -> tuple[list[tuple[str, int]], tuple[Any, ...]]:
    """Return what the writes return that are made, and the state that they leave."""
    results: list[tuple[str, int]] = []
    with ThreadPoolExecutor(1) as thread:
        try:
            with one.transaction():
                results.append((first, write(one, first)))
                begun = thread.submit(write, other, second)
                wait_until_held_or_done(third, other, begun)
                if not commits:
                    results.clear()
                    raise psycopg.Rollback
        finally:
            results.append((second, begun.result(60)))
    return sorted(results), state(third)


def wait_until_held_or_done(watching: Connection, watched: Connection, begun: Future[int]) -> None:
    while not begun.done() and watching.execute(WAITS, (watched.info.backend_pid,)).fetchone() != (True,):
        pass
