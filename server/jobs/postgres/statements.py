"""The statements on the tables in PostgreSQL, and the rows that they return. docs/dev/journal.md describes the tables.

Every write is one statement in a transaction of its own, READ COMMITTED. One that needs a lease begins with `me`, which
locks the row of the server: whoever reaps that server waits, or the statement finds no row and writes nothing. Knows no
connection; `store.py` and `membership.py` execute them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

from gptserve.server.jobs.records import CompletionRecord, EndRecord, OutputBatch, StoredJob, decode_outputs
from gptserve.server.jobs.sharing import SharedJob

_ME = "WITH me AS (SELECT id FROM gptserve.replicas WHERE id = %(me)s FOR KEY SHARE)"
_COLUMNS = ("id", *CompletionRecord.__slots__[1:])
_STRIPPED = tuple(name for name in _COLUMNS if name not in ("body", "prompts"))

JOIN = "INSERT INTO gptserve.replicas (id, ttl_s) VALUES (%(me)s, %(ttl_s)s)"
LEAVE = "DELETE FROM gptserve.replicas WHERE id = %(me)s"
RENEW = """
WITH seen AS (
    INSERT INTO gptserve.fingerprints SELECT DISTINCT fingerprint, clock_timestamp()
    FROM unnest(%(fingerprints)s::text[]) AS f(fingerprint) ORDER BY fingerprint
    ON CONFLICT (fingerprint) DO UPDATE SET seen_at = greatest(fingerprints.seen_at, excluded.seen_at)
)
UPDATE gptserve.replicas SET heartbeat_at = clock_timestamp() WHERE id = %(me)s
"""
# Of those whose row a write locks now the write comes first; the next time finds them again.
REAP = """
DELETE FROM gptserve.replicas WHERE id IN (
    SELECT id FROM gptserve.replicas WHERE heartbeat_at < clock_timestamp() - make_interval(secs => ttl_s)
    FOR UPDATE SKIP LOCKED
)
"""
_IS_FREE = """
replica IS NULL AND (
    is_cancelled OR fingerprint = ANY(%(fingerprints)s) OR NOT EXISTS (
        SELECT FROM gptserve.fingerprints f WHERE f.fingerprint = l.fingerprint
        AND f.seen_at > clock_timestamp() - make_interval(secs => %(forgotten_after_s)s)
    )
)
"""
# Only reads, as mostly there is nothing to take: a claim locks the row of its server.
LEASES = f"""
SELECT completion_id, is_cancelled FROM gptserve.leases WHERE replica = %(me)s
UNION ALL (SELECT NULL, NULL FROM gptserve.leases l WHERE {_IS_FREE} LIMIT 1)
"""
CLAIM = f"""
{_ME},
free AS (
    SELECT completion_id FROM gptserve.leases l
    WHERE {_IS_FREE}
    ORDER BY is_cancelled DESC, created, completion_id
    LIMIT %(limit)s + (SELECT count(*) FROM gptserve.leases WHERE replica IS NULL AND is_cancelled)
    FOR UPDATE SKIP LOCKED
)
UPDATE gptserve.leases l SET replica = me.id FROM free, me WHERE l.completion_id = free.completion_id
RETURNING l.created, l.completion_id
"""
RELEASE = "UPDATE gptserve.leases SET replica = NULL WHERE replica = %(me)s AND completion_id = ANY(%(ids)s)"
CANCEL = "UPDATE gptserve.leases SET is_cancelled = true WHERE completion_id = %(id)s AND NOT is_cancelled"

ADD = f"""
{_ME},
taken AS (
    INSERT INTO gptserve.keys SELECT %(owner)s::text, %(key)s::text, %(id)s FROM me WHERE %(key)s::text IS NOT NULL
    ON CONFLICT DO NOTHING RETURNING completion_id
),
new AS (
    INSERT INTO gptserve.completions ({", ".join(_COLUMNS)}, num_prompt_tokens, num_bytes)
    SELECT {", ".join(f"%({name})s" for name in (*_COLUMNS, "num_prompt_tokens", "num_bytes"))} FROM me
    WHERE %(key)s::text IS NULL OR EXISTS (SELECT FROM taken)
    RETURNING id, fingerprint, created
)
INSERT INTO gptserve.leases SELECT new.id, new.fingerprint, new.created, me.id FROM new, me RETURNING completion_id
"""
INSERT = f"""
INSERT INTO gptserve.completions ({", ".join(_COLUMNS)}, num_prompt_tokens, num_bytes)
VALUES ({", ".join(f"%({name})s" for name in (*_COLUMNS, "num_prompt_tokens", "num_bytes"))})
"""
IS_MEMBER = "SELECT EXISTS (SELECT FROM gptserve.replicas WHERE id = %(me)s)"
IS_HELD = "SELECT EXISTS (SELECT FROM gptserve.leases WHERE replica = %(me)s AND completion_id = %(id)s)"
# A batch follows the one before it, which a database that crashed may have lost. One that is repeated, as its answer
# was lost, is the same; another in its place is not touched. What is not returned was not written.
APPEND = f"""
{_ME}
INSERT INTO gptserve.batches AS b
SELECT t.id, t.n, t.outputs, coalesce(p.num_bytes, 0) + t.num_bytes, coalesce(p.num_tokens, 0) + t.num_tokens
FROM me, unnest(%(ids)b::text[], %(ns)b::integer[], %(outputs)b::text[], %(bytes)b::bigint[], %(tokens)b::bigint[])
    AS t(id, n, outputs, num_bytes, num_tokens)
JOIN gptserve.leases l ON l.completion_id = t.id
LEFT JOIN gptserve.batches p ON p.completion_id = t.id AND p.n = t.n - 1
WHERE l.replica = me.id AND (t.n = 0 OR p.n IS NOT NULL)
ON CONFLICT (completion_id, n) DO UPDATE SET outputs = excluded.outputs WHERE b.outputs = excluded.outputs
RETURNING completion_id
"""
ADD_ATTEMPT = f"""
{_ME}
INSERT INTO gptserve.attempts SELECT %(id)s, %(n)s, %(num_batches)s, me.id FROM me, gptserve.leases l
WHERE l.completion_id = %(id)s AND l.replica = me.id
ON CONFLICT (completion_id, n) DO UPDATE SET replica = excluded.replica RETURNING n
"""
CLEAR_ATTEMPTS = "DELETE FROM gptserve.attempts WHERE replica = %(me)s"
_GIVEN = """
unnest(%(ids)s::text[], %(statuses)s::text[], %(errors)s::text[], %(finished_ats)s::double precision[],
    %(nums_batches)s::integer[], %(nums_tokens)s::bigint[], %(positions)s::text[])
    AS g(id, status, error, finished_at, num_batches, num_tokens, position)
"""
END = f"""
{_ME},
gone AS (
    DELETE FROM gptserve.leases l USING me, {_GIVEN} WHERE l.completion_id = g.id AND l.replica = me.id RETURNING g.*
),
free AS (DELETE FROM gptserve.keys k USING gone WHERE k.completion_id = gone.id AND gone.status = 'failed')
INSERT INTO gptserve.ends SELECT * FROM gone RETURNING completion_id
"""
# Of ends that may have been written, as an answer was lost, those that were.
IS_ENDED = f"""
SELECT e.completion_id FROM gptserve.ends e JOIN {_GIVEN} ON e.completion_id = g.id
WHERE (e.status, e.finished_at, e.num_batches, e.num_tokens)
    = (g.status, g.finished_at, g.num_batches, g.num_tokens)
AND e.error IS NOT DISTINCT FROM g.error AND e.position IS NOT DISTINCT FROM g.position
"""
FORGET = "DELETE FROM gptserve.completions WHERE id = ANY(%(ids)s)"
READ_RECORD = f"SELECT {', '.join(_COLUMNS)} FROM gptserve.completions WHERE id = %(id)s"
READ_BATCHES = """
SELECT n, outputs FROM gptserve.batches WHERE completion_id = %(id)s AND n >= %(first)s ORDER BY n LIMIT %(limit)s
"""
NUM_BYTES = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
WHERE c.relnamespace = 'gptserve'::regnamespace AND c.relkind = 'r'
"""

_FIND = f"""
SELECT {", ".join(f"c.{name}" for name in _STRIPPED)}, c.num_prompt_tokens, c.num_bytes + coalesce(b.num_bytes, 0),
    coalesce(b.n + 1, 0), coalesce(b.num_tokens, 0), coalesce(l.is_cancelled, false),
    ARRAY(SELECT a.num_batches FROM gptserve.attempts a WHERE a.completion_id = c.id ORDER BY a.n),
    e.status, e.error, e.finished_at, e.num_batches, e.num_tokens, e.position
FROM gptserve.completions c
LEFT JOIN gptserve.ends e ON e.completion_id = c.id
LEFT JOIN gptserve.leases l ON l.completion_id = c.id
LEFT JOIN LATERAL (
    SELECT n, num_bytes, num_tokens FROM gptserve.batches WHERE completion_id = c.id ORDER BY n DESC LIMIT 1
) b ON true
"""
_IN_ORDER = "ORDER BY e.finished_at NULLS LAST, c.created, c.id"
FIND = f"{_FIND} WHERE c.id = ANY(%(ids)s) {_IN_ORDER}"
FIND_BY_KEY = f"""
{_FIND} JOIN gptserve.keys k ON k.completion_id = c.id WHERE k.key = %(key)s
AND (k.owner IS NULL) = (%(owner)s::text IS NULL) AND coalesce(k.owner, '') = coalesce(%(owner)s, '')
"""
FIND_ALL = f"{_FIND} {_IN_ORDER}"
IDS = f"""
SELECT c.id FROM gptserve.completions c LEFT JOIN gptserve.ends e ON e.completion_id = c.id {_IN_ORDER}
"""


def completion_row(record: CompletionRecord) -> dict[str, Any]:
    """Return the parameters of ADD but `me`; takes long for long prompts."""
    values = {name: getattr(record, name) for name in record.__slots__}
    row = {"id": values.pop("completion_id"), **values, "prompts": json.dumps(record.prompts)}
    texts = sum(len(value) for value in row.values() if isinstance(value, str))
    return {**row, "num_prompt_tokens": sum(map(len, record.prompts)), "num_bytes": texts}


def end_columns(ends: Iterable[tuple[str, EndRecord]]) -> dict[str, list[Any]]:
    """Return the parameters of END but `me`, and of IS_ENDED."""
    names = ("ids", "statuses", "errors", "finished_ats", "nums_batches", "nums_tokens", "positions")
    rows = [(completion_id, *astuple(end)) for completion_id, end in ends]
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def to_record(row: Sequence[Any]) -> CompletionRecord:
    """Return the record in a row of READ_RECORD. Raises ValueError."""
    values = dict(zip(CompletionRecord.__slots__, row, strict=True))
    return CompletionRecord(**values | {"prompts": tuple(map(tuple, json.loads(values["prompts"])))})


def to_shared(row: Sequence[Any]) -> SharedJob:
    """Return the completion in a row of FIND, FIND_BY_KEY or FIND_ALL."""
    values = dict(zip(_STRIPPED, row, strict=False))
    record = CompletionRecord(completion_id=values.pop("id"), body="", prompts=(), **values)
    num_prompt_tokens, num_bytes, num_batches, num_tokens, is_cancelled, attempts, *end = row[len(_STRIPPED) :]
    ended = None if end[0] is None else EndRecord(*end)
    stored = StoredJob(record, num_prompt_tokens, num_bytes, num_batches, tuple(attempts), ended)
    return SharedJob(stored, num_tokens if ended is None else ended.num_tokens, is_cancelled)


def to_batches(completion_id: str, first: int, rows: Iterable[Sequence[Any]]) -> list[OutputBatch]:
    """Return the outputs in rows of READ_BATCHES, of which the first is the `first`-th. Raises ValueError."""
    batches = []
    for expected, (n, outputs) in enumerate(rows, first):
        if n != expected:
            raise ValueError(f"it is damaged: {completion_id!r} lacks batch {expected}")
        batches.append(decode_outputs(outputs))
    return batches
