"""Chooses where completions, files and batches are kept, memory, a folder or a database, and starts what keeps them.

`serve.py`, `cluster/` and `cli/state.py` call it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from gptserve.server.batches.folder import FolderBatchStore
from gptserve.server.batches.store import BatchStore, BatchStoreError
from gptserve.server.core.settings import ServerSettings, StateSync
from gptserve.server.files.folder import FolderFileStore
from gptserve.server.files.store import FileStore, FileStoreError
from gptserve.server.jobs.sqlite.database import FILE_NAME
from gptserve.server.jobs.sqlite.store import SqliteJobStore
from gptserve.server.jobs.store import JOURNAL_UNAVAILABLE, JobStore, JobStoreError, StoreUnavailableError

_FILES, _BATCHES = "files", "batches"  # folders in that of the journal

_START_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)

Stores = tuple[JobStore, FileStore, BatchStore]


def make_stores(settings: ServerSettings) -> Stores:
    """Return the stores of these settings, which have not been opened. The first is opened first, and closed last."""
    folder, sync = settings.state_dir, settings.state_sync
    if settings.state_url is None:
        return SqliteJobStore(folder, sync), *_beside(folder, sync)
    from gptserve.server.batches.postgres import PostgresBatchStore
    from gptserve.server.files.postgres import PostgresFileStore
    from gptserve.server.jobs.postgres.store import PostgresJobStore

    jobs = PostgresJobStore(settings.state_url, sync, settings.state_lease_ttl_s)
    return jobs, PostgresFileStore(jobs.beside), PostgresBatchStore(jobs.beside)


def _beside(folder: Path | None, sync: StateSync = "full") -> tuple[FileStore, BatchStore]:
    return FolderFileStore(folder and folder / _FILES), FolderBatchStore(folder and folder / _BATCHES, sync)


class Kept(Protocol):
    """Files, jobs or batches, which read what is kept."""

    async def start(self) -> None:
        """Read it. Raises an error of its store; after an unavailable store it may be called again."""


async def open_store(store: JobStore) -> None:
    """Open a store, unless it is a database that is away. Raises JobStoreError."""
    try:
        await store.open()
    except StoreUnavailableError:
        logger.warning("the server starts without its database; until that is there, only what is not stored is served")


async def start_kept(store: JobStore, kept: Sequence[Kept]) -> asyncio.Task[None] | None:
    """Start these one after another; return a task that does so once the database is there if it is away.

    Raises JobStoreError, FileStoreError or BatchStoreError.
    """
    unstarted = list(kept)
    try:
        await _start(store, unstarted)
    except (JobStoreError, FileStoreError, BatchStoreError) as error:
        if error.code != JOURNAL_UNAVAILABLE:
            raise
        return asyncio.create_task(_start_later(store, unstarted))
    return None


async def _start(store: JobStore, unstarted: list[Kept]) -> None:
    await store.open()
    while unstarted:
        await unstarted[0].start()
        del unstarted[0]


async def _start_later(store: JobStore, unstarted: list[Kept]) -> None:
    told = None
    while True:
        await asyncio.sleep(_START_INTERVAL_S * random.uniform(0.75, 1.0))  # not all servers at once
        try:
            await _start(store, unstarted)
        except (JobStoreError, FileStoreError, BatchStoreError) as error:
            if error.code != JOURNAL_UNAVAILABLE and str(error) != told:
                told = str(error)
                logger.error("nothing is stored: %s", error)
        else:
            logger.info("the database is there; completions, files and batches are stored from now on")
            return


def place_of(settings: ServerSettings) -> str:
    """Return the option that says where the store is."""
    return "state-dir" if settings.state_url is None else "state-url"


async def import_folder(folder: Path, url: str) -> tuple[int, int]:
    """Copy all that a folder has into a database that has none, while no server uses either.

    Returns the number of completions, and how many of these have not ended.

    Raises JobStoreError; then the database is as before.
    """
    from gptserve.server.batches.transfer import import_batches
    from gptserve.server.jobs.postgres.transfer import import_jobs

    if not (folder / FILE_NAME).exists():
        raise JobStoreError(f"{folder} has no journal")
    source = SqliteJobStore(folder)
    files, batches = _beside(folder)
    try:
        return await import_jobs(url, source, partial(import_batches, files=files, batches=batches))
    except (FileStoreError, BatchStoreError) as error:
        raise JobStoreError(str(error)) from error
    finally:
        for store in (source, files, batches):
            await store.close()


async def export_folder(url: str, folder: Path) -> tuple[int, int]:
    """Copy all of a database that no server uses into a folder that has none of it; returns as `import_folder`.

    Raises JobStoreError; then the folder has no journal.
    """
    from gptserve.server.batches.transfer import export_batches
    from gptserve.server.jobs.postgres.transfer import export_jobs

    taken = JobStoreError(f"{folder} has a journal already; name another folder")
    if (folder / FILE_NAME).exists() or any((folder / name).exists() for name in (_FILES, _BATCHES)):
        raise taken
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as name:
            target = SqliteJobStore(Path(name), "full")
            files, batches = _beside(Path(name))
            try:
                counts = await export_jobs(url, target, partial(export_batches, files=files, batches=batches))
            finally:
                for store in (target, files, batches):
                    await store.close()
            for part in (_FILES, _BATCHES):
                os.rename(Path(name) / part, folder / part)
            os.link(Path(name) / FILE_NAME, folder / FILE_NAME)  # all of it at once, and over no other
    except FileExistsError as error:
        raise taken from error
    except (FileStoreError, BatchStoreError) as error:
        raise JobStoreError(str(error)) from error
    except OSError as error:
        raise JobStoreError(f"{folder} cannot be written: {error.strerror}") from error
    return counts
