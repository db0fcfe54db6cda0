"""The journal's SQLite database: its tables, what is checked when it is opened, and what is noticed.

SQLite takes a write-ahead log (WAL) that is damaged, cut or missing for the shorter one that it then looks like.
`_last_commit` tells the difference. `store.py` calls `connect`. Knows no completions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import struct
from pathlib import Path

from gptserve.server.core.settings import StateSync

FILE_NAME = "gptserve.sqlite3"
SCHEMA_VERSION = 2
APPLICATION_ID = 0x67707473  # "gpts": tells a journal from any other SQLite file

_WAL_LIMIT = 4 * 2**20  # bytes that its file keeps for reuse
_VACUUM_PAGES = 256  # moved at once: 1 MiB, some milliseconds in which writes wait
_SCHEMA = f"""
BEGIN;
CREATE TABLE completions (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, created INTEGER NOT NULL, model TEXT NOT NULL, fingerprint TEXT NOT NULL,
    batch_invariant INTEGER NOT NULL, seed INTEGER NOT NULL, owner TEXT, tokenizer TEXT NOT NULL, body TEXT NOT NULL,
    prompts TEXT NOT NULL, max_tokens INTEGER NOT NULL, deadline REAL, key TEXT, digest TEXT NOT NULL,
    checksum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE batches (
    completion_id TEXT NOT NULL REFERENCES completions ON DELETE CASCADE, n INTEGER NOT NULL, outputs TEXT NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (completion_id, n)
) WITHOUT ROWID;
CREATE TABLE attempts (
    completion_id TEXT NOT NULL REFERENCES completions ON DELETE CASCADE, n INTEGER NOT NULL,
    num_batches INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (completion_id, n)
) WITHOUT ROWID;
CREATE TABLE ends (
    completion_id TEXT PRIMARY KEY REFERENCES completions ON DELETE CASCADE, status TEXT NOT NULL, error TEXT,
    finished_at REAL NOT NULL, num_batches INTEGER NOT NULL, num_tokens INTEGER NOT NULL, position TEXT,
    checksum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE renamed_owners (former TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE state (is_open INTEGER NOT NULL);
INSERT INTO state VALUES (0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_WAL_HEADER, _FRAME_HEADER = struct.Struct(">8xI4x8s8x"), struct.Struct(">4xI8s8x")  # sqlite.org/fileformat2.html

logger = logging.getLogger(__name__)


def connect(folder: Path | None, sync: StateSync) -> sqlite3.Connection:
    """Open or create the database, and lock it. Raises sqlite3.Error, OSError or ValueError."""
    last_commit = 0
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite would create a file that everybody can read. Its other files get the permissions of this one.
        os.close(os.open(folder / FILE_NAME, os.O_CREAT | os.O_RDWR, 0o600))
        last_commit = _last_commit(folder / f"{FILE_NAME}-wal")
    path = ":memory:" if folder is None else str(folder / FILE_NAME)
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        _lock(connection)
        _check(connection, sync)
        if folder is not None:
            _open(connection, last_commit)
    except BaseException:
        connection.close()
        raise
    return connection


def disconnect(connection: sqlite3.Connection) -> None:
    """Close the database, and note in it that this was done in order."""
    with contextlib.suppress(sqlite3.Error):  # a full disk: the next start then warns for nothing
        connection.execute("UPDATE state SET is_open = 0")
    connection.close()


def give_back(connection: sqlite3.Connection) -> bool:
    """Give a part of the space of deleted rows back to the disk; return whether there is more."""
    [(num_free,)] = connection.execute("PRAGMA freelist_count")
    connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
    [(num_left,)] = connection.execute("PRAGMA freelist_count")
    has_more: bool = 0 < num_left < num_free
    if not has_more:
        _checkpoint(connection)  # only this shortens the file
    return has_more


def _lock(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        [(num_pages,)] = connection.execute("PRAGMA page_count")
        if num_pages == 0:  # later it has no effect, but writes
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise ValueError("another server is using it") from error
        raise


def _check(connection: sqlite3.Connection, sync: StateSync) -> None:
    """Check the whole database, and create its tables if it is new."""
    connection.execute(f"PRAGMA synchronous = {sync}")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT}")
    [(verdict, *_), *_] = connection.execute("PRAGMA quick_check(1)").fetchall()
    if verdict != "ok":
        raise ValueError(f"it is damaged: {verdict}")
    [(application_id,)] = connection.execute("PRAGMA application_id")
    [(version,)] = connection.execute("PRAGMA user_version")
    [(num_tables,)] = connection.execute("SELECT count(*) FROM sqlite_master")
    if (application_id, version, num_tables) == (0, 0, 0):
        connection.executescript(_SCHEMA)
    elif application_id != APPLICATION_ID:
        raise ValueError("it is a database of something else")
    elif version != SCHEMA_VERSION:
        how = "older" if version < SCHEMA_VERSION else "newer"
        versions = f"its format is version {version}, of {how} servers, and this one reads version {SCHEMA_VERSION}"
        raise ValueError(f"{versions}; move it away to start without it")
    for table, *_ in connection.execute("PRAGMA foreign_key_check"):
        raise ValueError(f"it is damaged: a row of {table} belongs to no completion")


def _open(connection: sqlite3.Connection, last_commit: int) -> None:
    """Warn if commits were lost. Note, in the main file, that a server is using the database."""
    num_frames = _checkpoint(connection)
    [(was_open,)] = connection.execute("SELECT is_open FROM state")
    if last_commit > num_frames or (was_open and last_commit == 0):
        logger.warning(
            "the journal has lost its last commits: %s-wal is missing, cut or damaged, as after a power cut; the "
            "completions in them are unknown, or are computed again",
            FILE_NAME,
        )
    connection.execute("UPDATE state SET is_open = 1")
    _checkpoint(connection)


def _checkpoint(connection: sqlite3.Connection) -> int:
    """Copy the WAL into the main file, without emptying it; return the number of its frames."""
    [(_, num_frames, _)] = connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    return int(num_frames)


def _last_commit(path: Path) -> int:
    """Return the number of the last frame in a WAL's file that ended a commit, whether SQLite can read it or not.

    Frames of an earlier round, which SQLite overwrites one by one, have another salt.
    """
    last = 0
    try:
        with path.open("rb") as file:
            header = file.read(_WAL_HEADER.size)
            if len(header) < _WAL_HEADER.size:
                return 0
            page_size, salt = _WAL_HEADER.unpack(header)
            num_frames = (os.fstat(file.fileno()).st_size - _WAL_HEADER.size) // (_FRAME_HEADER.size + page_size)
            for n in range(1, num_frames + 1):
                file.seek(_WAL_HEADER.size + (n - 1) * (_FRAME_HEADER.size + page_size))
                size_after_commit, frame_salt = _FRAME_HEADER.unpack(file.read(_FRAME_HEADER.size))
                if size_after_commit and frame_salt == salt:
                    last = n
    except FileNotFoundError:
        pass
    return last
