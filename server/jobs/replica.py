"""One of several servers with one store: stays a member, takes over what others leave, and follows what they compute.

Three loops: one renews the membership and ends those of servers that no longer do so; one looks every moment at what
has changed; one brings the whole index in step, from which the limits are counted. `background.py` starts it and knows
how to run what it takes. Knows no engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gptserve.server.core.errors import ServiceError
from gptserve.server.core.repeating import repeat
from gptserve.server.jobs.index import JobIndex
from gptserve.server.jobs.job import RunningJob
from gptserve.server.jobs.mirror import Mirror
from gptserve.server.jobs.sharing import SharedJob, Sharing
from gptserve.server.jobs.store import (
    JOURNAL_UNAVAILABLE,
    JobStoreError,
    LeaseLostError,
    StoreUnavailableError,
    cancelled,
)

FOLLOW_INTERVAL_S = 0.1  # for readers of what another server computes
CLAIM_INTERVAL_S = 0.25  # after which a free lease is taken, or an order to cancel obeyed
RENEWALS_A_TTL = 3  # so that two may fail in a row

logger = logging.getLogger(__name__)


class Replica:
    """The server among those of its store.

    take runs a completion whose lease this server has got; stop ends one that runs here; capacity says how many more
    may be taken, and of which fingerprints; tidy deletes what exceeds the limits.
    """

    def __init__(
        self,
        sharing: Sharing,
        index: JobIndex,
        mirror: Mirror,
        *,
        take: Callable[[SharedJob], Awaitable[None]],
        stop: Callable[[RunningJob, ServiceError], None],
        capacity: Callable[[], tuple[frozenset[str], int]],
        tidy: Callable[[], None],
        tidy_interval_s: float,
    ) -> None:
        self._sharing = sharing
        self._index = index
        self._mirror = mirror
        self._take = take
        self._stop = stop
        self._capacity = capacity
        self._tidy = tidy
        self._tidy_interval_s = tidy_interval_s
        self._taking: set[str] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._claims = False
        self._steady_since: float | None = None
        self._renewed_at = 0.0

    async def start(self) -> None:
        """Start the loops. Raises JobStoreError."""
        if not await self._sharing.renew(self._capacity()[0]):  # the model took long to load
            await self._sharing.join()
        self._claims, self._renewed_at = True, time.monotonic()
        renewal_s = self._sharing.ttl_s / RENEWALS_A_TTL
        loops = ((self._renew, renewal_s), (self._poll, CLAIM_INTERVAL_S), (self._follow, FOLLOW_INTERVAL_S))
        repeated = [*loops, (self._bring_in_step, self._tidy_interval_s)]
        self._loops = [
            asyncio.create_task(repeat(work, 0.75 * interval_s, interval_s, untold=JOURNAL_UNAVAILABLE))
            for work, interval_s in repeated
        ]

    def stop_claiming(self) -> None:
        """Take over nothing from now on."""
        self._claims = False

    async def leave(self) -> None:
        """End the loops and give up all leases, which others take at once; those of a store out of reach later."""
        self._claims = False
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        self._loops = []
        with suppress(JobStoreError):
            await self._sharing.leave()

    async def _renew(self) -> None:
        """Renew the membership. After an outage others get as long as they may stay silent before they are reaped."""
        now = time.monotonic()
        try:
            is_member = await self._sharing.renew(self._capacity()[0])
        except JobStoreError:
            self._steady_since = None
            if now - self._renewed_at > self._sharing.ttl_s:
                self._fail_followers()
            raise
        self._renewed_at = now
        if not is_member:
            await self._rejoin()
            return
        if self._steady_since is None:
            self._steady_since = now
        elif now - self._steady_since > self._sharing.ttl_s and (num_dead := await self._sharing.reap()):
            logger.warning("%d servers of the database no longer answer; their completions go on elsewhere", num_dead)

    async def _rejoin(self) -> None:
        """Let go of all that runs here, which others may have taken, and become a member again."""
        logger.warning("the database took this server for dead; its stored completions go on by whoever takes them")
        for job in self._index:
            if job.running is not None:
                self._stop(job.running, LeaseLostError())
        while runs := [job for job in self._index if job.running is not None]:
            await runs[0].wait_for_change()
        await self._sharing.join()

    async def _poll(self) -> None:
        """Obey orders to cancel, give up leases of what does not run here, and claim what nobody has."""
        leases, orphans = await self._sharing.leases(self._capacity()[0]), []
        for completion_id, is_cancelled in leases.held.items():
            job = self._index.get(completion_id)
            if job is None or job.running is None:
                orphans.append(completion_id)
            elif is_cancelled:
                self._stop(job.running, cancelled())
        if orphans := [completion_id for completion_id in orphans if completion_id not in self._taking]:
            await self._sharing.release(orphans)
        if not self._claims or not leases.are_some_free:
            return
        fingerprints, limit = self._capacity()
        claimed = await self._sharing.claim(fingerprints, limit)
        self._taking.update(claimed)
        try:
            for shared in await self._sharing.find(claimed) if claimed else ():
                await self._take(shared)
        finally:
            self._taking.difference_update(claimed)

    async def _follow(self) -> None:
        """Look at the progress of what others compute and somebody here waits for."""
        followed = [job.completion_id for job in self._index if job.is_elsewhere and job.num_waiting and not job.error]
        await self._mirror.refresh_some(followed)

    async def _bring_in_step(self) -> None:
        await self._mirror.refresh_all()
        self._tidy()

    def _fail_followers(self) -> None:
        """Tell who waits for what others compute that the store is away."""
        for job in self._index:
            if job.is_elsewhere and job.num_waiting and job.error is None:
                job.error = StoreUnavailableError("the database of stored completions cannot be reached")
                job.wake_readers()
