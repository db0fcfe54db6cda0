"""The tables in PostgreSQL, and their version. docs/dev/journal.md describes them.

`store.py` calls `prepare`, `statements.py` has the statements on them.
"""

from __future__ import annotations

from psycopg import AsyncConnection

ENCODING = "UTF8"
ROLE_INDEPENDENT = (
    "SET client_min_messages = warning; SET lock_timeout = 0; SET default_transaction_isolation = 'read committed'"
)
"""What a connection begins with, as roles and databases may have defaults of their own."""
OLDEST_SERVER = 140000  # as PostgreSQL writes its version 14

_LOCK = 0x67707473  # "gpts": the advisory lock that one server at a time prepares the tables under
_COMPLETIONS = """
CREATE SCHEMA gptserve;
CREATE TABLE gptserve.meta (version integer NOT NULL);
INSERT INTO gptserve.meta VALUES (1);
CREATE TABLE gptserve.replicas (
    id uuid PRIMARY KEY, heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(), ttl_s double precision NOT NULL
);
CREATE TABLE gptserve.fingerprints (fingerprint text PRIMARY KEY, seen_at timestamptz NOT NULL);
CREATE TABLE gptserve.completions (
    id text PRIMARY KEY, kind text NOT NULL, created bigint NOT NULL, model text NOT NULL, fingerprint text NOT NULL,
    batch_invariant boolean NOT NULL, seed bigint NOT NULL, owner text, tokenizer text NOT NULL, body text NOT NULL,
    prompts text NOT NULL, max_tokens bigint NOT NULL, deadline double precision, key text, digest text NOT NULL,
    num_prompt_tokens bigint NOT NULL, num_bytes bigint NOT NULL
);
CREATE TABLE gptserve.keys (
    owner text, key text NOT NULL, completion_id text NOT NULL REFERENCES gptserve.completions ON DELETE CASCADE
);
CREATE UNIQUE INDEX ON gptserve.keys (key, (owner IS NULL), (coalesce(owner, '')));
CREATE INDEX ON gptserve.keys (completion_id);
CREATE TABLE gptserve.leases (
    completion_id text PRIMARY KEY REFERENCES gptserve.completions ON DELETE CASCADE, fingerprint text NOT NULL,
    created bigint NOT NULL, replica uuid REFERENCES gptserve.replicas ON DELETE SET NULL,
    is_cancelled boolean NOT NULL DEFAULT false
);
CREATE INDEX ON gptserve.leases (replica);
CREATE INDEX ON gptserve.leases (created) WHERE replica IS NULL;
CREATE TABLE gptserve.batches (
    completion_id text NOT NULL REFERENCES gptserve.completions ON DELETE CASCADE, n integer NOT NULL,
    outputs text NOT NULL, num_bytes bigint NOT NULL, num_tokens bigint NOT NULL, PRIMARY KEY (completion_id, n)
);
CREATE TABLE gptserve.attempts (
    completion_id text NOT NULL REFERENCES gptserve.completions ON DELETE CASCADE, n integer NOT NULL,
    num_batches integer NOT NULL, replica uuid NOT NULL, PRIMARY KEY (completion_id, n)
);
CREATE INDEX ON gptserve.attempts (replica);
CREATE TABLE gptserve.ends (
    completion_id text PRIMARY KEY REFERENCES gptserve.completions ON DELETE CASCADE, status text NOT NULL, error text,
    finished_at double precision NOT NULL, num_batches integer NOT NULL, num_tokens bigint NOT NULL, position text
);
"""
_FILES = """
CREATE TABLE gptserve.contents (id uuid PRIMARY KEY, replica uuid REFERENCES gptserve.replicas ON DELETE CASCADE);
CREATE INDEX ON gptserve.contents (replica);
CREATE TABLE gptserve.pieces (
    content uuid NOT NULL REFERENCES gptserve.contents ON DELETE CASCADE, place bigint NOT NULL, data bytea NOT NULL,
    PRIMARY KEY (content, place)
);
ALTER TABLE gptserve.pieces ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE gptserve.files (
    file_id text PRIMARY KEY, owner text, filename text NOT NULL, purpose text NOT NULL, num_bytes bigint NOT NULL,
    created bigint NOT NULL, expires_at bigint,
    content uuid NOT NULL UNIQUE REFERENCES gptserve.contents ON DELETE CASCADE
);
"""
_BATCHES = """
CREATE TABLE gptserve.batch_records (
    batch_id text PRIMARY KEY, created bigint NOT NULL, status text NOT NULL, record text NOT NULL, cancelled_at bigint
);
CREATE TABLE gptserve.batch_leases (
    batch_id text PRIMARY KEY REFERENCES gptserve.batch_records ON DELETE CASCADE,
    input_file_id text NOT NULL REFERENCES gptserve.files, fingerprint text NOT NULL, created bigint NOT NULL,
    replica uuid REFERENCES gptserve.replicas ON DELETE SET NULL, num_completed integer NOT NULL DEFAULT 0,
    num_failed integer NOT NULL DEFAULT 0, num_bytes bigint NOT NULL DEFAULT 0
);
CREATE INDEX ON gptserve.batch_leases (replica);
CREATE INDEX ON gptserve.batch_leases (input_file_id);
CREATE TABLE gptserve.batch_results (
    batch_id text NOT NULL REFERENCES gptserve.batch_records ON DELETE CASCADE, n integer NOT NULL,
    failed boolean NOT NULL, result text NOT NULL, PRIMARY KEY (batch_id, n)
);
CREATE TABLE gptserve.batch_begun (
    batch_id text NOT NULL REFERENCES gptserve.batch_records ON DELETE CASCADE, n integer NOT NULL,
    replica uuid NOT NULL, PRIMARY KEY (batch_id, n, replica)
);
"""
STEPS = (_COMPLETIONS, _FILES, _BATCHES)
"""What each version adds to the one before it, which servers of that one pass over while they run."""
SCHEMA_VERSION = len(STEPS)


async def prepare(connection: AsyncConnection) -> None:
    """Create the tables that are missing.

    Raises psycopg.Error, or ValueError for tables of a newer version or a database that cannot keep every text.
    """
    version = connection.info.server_version
    if version < OLDEST_SERVER:
        raise ValueError(f"it needs version {OLDEST_SERVER // 10000} or newer, and the server has {version // 10000}")
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in (ENCODING, "SQL_ASCII"):  # which keeps bytes as they are
        raise ValueError(f"its encoding is {encoding}, which lacks characters; name a database in {ENCODING}")
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        found = await (await connection.execute("SELECT to_regclass('gptserve.meta')")).fetchone()
        row = None
        if found != (None,):
            row = await (await connection.execute("SELECT version FROM gptserve.meta")).fetchone()
        found_version = 0 if row is None else row[0]
        if found_version > SCHEMA_VERSION:
            versions = f"its format is version {found_version}, of newer servers"
            raise ValueError(f"{versions}, and this one reads version {SCHEMA_VERSION}; name another database")
        if found_version < SCHEMA_VERSION:
            for step in STEPS[found_version:]:
                await connection.execute(step.encode())
            await connection.execute("UPDATE gptserve.meta SET version = %s", (SCHEMA_VERSION,))
