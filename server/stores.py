"""Chooses where completions are kept: memory, a folder or a database. `serve.py` calls it."""

from __future__ import annotations

from gptserve.server.core.settings import ServerSettings
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JobStore


def make_store(settings: ServerSettings) -> JobStore:
    """Return the store of these settings, which has not been opened."""
    if settings.state_url is None:
        return SqliteJobStore(settings.state_dir, settings.state_sync)
    from gptserve.server.jobs.postgres.store import PostgresJobStore

    return PostgresJobStore(settings.state_url, settings.state_sync, settings.state_lease_ttl_s)


def place_of(settings: ServerSettings) -> str:
    """Return the option that says where the store is."""
    return "state-dir" if settings.state_url is None else "state-url"
