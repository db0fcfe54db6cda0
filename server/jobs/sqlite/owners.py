"""Renames the owners of a journal that an earlier version wrote, which named keys of options by their positions.

A position says nothing of the key: once a key is taken away, the next one has its position. So this happens once, at
the first start with such keys, and only if they may be the ones that the journal's owners had. It happens no more once
a key file has given the name of a position, which is then that key's own, nor to journals that this version creates:
these have the table from the beginning. `store.py` calls it.
"""

from __future__ import annotations

import logging
import re
import sqlite3

from gptserve.server.jobs.sqlite.rows import to_record, update_owner
from gptserve.server.jobs.store import FormerOwners

_POSITION = re.compile(r"key-[1-9]\d{0,5}")
_TABLE = "renamed_owners"

logger = logging.getLogger(__name__)


def rename_owners(connection: sqlite3.Connection, former: FormerOwners) -> None:
    """Rename the owners of all completions, unless a start has done so. Raises ValueError or sqlite3.Error."""
    [(was_done,)] = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = ?", (_TABLE,))
    if was_done:
        return
    has_namesake = any(_POSITION.fullmatch(owner) for owner in former.others)
    if not former.names:
        if has_namesake:
            _create_table(connection)
        return
    owners = {owner for (owner,) in connection.execute("SELECT DISTINCT owner FROM completions")} - former.others
    positions = {owner for owner in owners if owner is not None and _POSITION.fullmatch(owner)}
    unknown = positions - former.names.keys()
    if unknown:
        logger.warning(
            "the journal has completions of %s, and there are %d keys of --api-key: as these are not the same keys as "
            "before, nobody finds the completions of %s",
            ", ".join(sorted(unknown)),
            len(former.names),
            ", ".join(sorted(positions)),
        )
        if has_namesake:
            _create_table(connection)
        return
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        for position in positions:
            ids = connection.execute("SELECT id FROM completions WHERE owner = ?", (position,)).fetchall()
            for completion_id in ids:  # one at a time, as prompts may be long
                row = connection.execute("SELECT * FROM completions WHERE id = ?", completion_id).fetchone()
                connection.execute(*update_owner(to_record(row), former.names[position]))
        _create_table(connection)
        connection.executemany(f"INSERT INTO {_TABLE} VALUES (?, ?)", former.names.items())
    for position in sorted(positions):
        logger.warning("the completions of %s now belong to %s, the key in its place", position, former.names[position])


def _create_table(connection: sqlite3.Connection) -> None:
    connection.execute(f"CREATE TABLE {_TABLE} (former TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID")
