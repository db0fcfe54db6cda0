"""The index of background jobs in memory: by id, by owner with idempotency key, and in the order of their ends.

It says which jobs must go: those whose time is over, and those that ended first where there are too many. Owners share
the limits fairly: each is sure of the limit divided by the number of owners that have jobs, and what some leave is free
for the others. `background.py` calls it, and deletes jobs in the store. Knows neither the store nor the engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping

from gptserve.server.core.errors import ServiceError
from gptserve.server.core.settings import ServerSettings
from gptserve.server.jobs.job import BackgroundJob, OwnerAndKey


class JobIndex:
    """All jobs. Invariants: a key leads to one job that has not failed; a job whose time is over is not found."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float]) -> None:
        self._result_ttl_s = settings.result_ttl_s
        self._limits: tuple[tuple[int, Callable[[BackgroundJob], int], str], ...] = (
            (settings.max_results, lambda job: 1, "of your background or keyed completions are running"),
            (settings.max_results_bytes, lambda job: job.num_bytes, "bytes of your running completions are kept"),
        )
        self._clock = clock
        self._jobs: dict[str, BackgroundJob] = {}
        self._ended: dict[str, BackgroundJob] = {}
        self._keys: dict[OwnerAndKey, BackgroundJob] = {}

    def __iter__(self) -> Iterator[BackgroundJob]:
        return iter(self._jobs.values())

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        return Counter(job.status for job in self)

    def get(self, completion_id: str) -> BackgroundJob | None:
        """Return a job by its id, also one whose time is over."""
        return self._jobs.get(completion_id)

    def find(self, completion_id: str) -> BackgroundJob | None:
        """Return a job by its id."""
        job = self._jobs.get(completion_id)
        return None if job is None or self._is_over(job) else job

    def find_by_key(self, owner_and_key: OwnerAndKey) -> BackgroundJob | None:
        """Return the job that began with this key of this owner."""
        job = self._keys.get(owner_and_key)
        return None if job is None or self._is_over(job) else job

    def fingerprints(self, owner_and_key: OwnerAndKey) -> set[str]:
        """Return the fingerprints of the models of all jobs that began with this key, of those that failed, too."""
        return {job.record.fingerprint for job in self if job.owner_and_key == owner_and_key}

    def check_room(self, owner: str | None) -> None:
        """Raise ServiceError if this owner may not begin a job now.

        That is: the jobs that run, which nothing replaces, reach a limit, and those of the owner reach its share.
        """
        running = [job for job in self if job.completion_id not in self._ended]
        num_owners = len({job.record.owner for job in self} | {owner})
        for limit, size_of, unit in self._limits:
            own = sum(size_of(job) for job in running if job.record.owner == owner)
            if sum(map(size_of, running)) >= limit and own * num_owners >= limit:
                message = f"{own} {unit}, and the limit for all owners is {limit}"
                raise ServiceError("too_many_kept", message, retry_after_s=1)

    def add(self, job: BackgroundJob) -> None:
        """Add a job that runs."""
        self._jobs[job.completion_id] = job

    def add_stored(self, job: BackgroundJob) -> None:
        """Add a job of an earlier server, with its key. Call it for all that ended, in this order, then for others."""
        self.add(job)
        if job.has_ended:
            self._ended[job.completion_id] = job
        # Two jobs share a key when the end of the first could not be journaled: its clients were told that it failed,
        # and a retry began the second. So the one that has ended has the key.
        other = None if job.owner_and_key is None else self._keys.get(job.owner_and_key)
        if job.status != "failed" and (other is None or not other.has_ended or job.has_ended):
            self.give_key(job)

    def give_key(self, job: BackgroundJob) -> None:
        """Let the key of a job lead to it."""
        if job.owner_and_key is not None:
            self._keys[job.owner_and_key] = job

    def note_end(self, job: BackgroundJob) -> None:
        """Note that a job has ended. A retry after a failure begins a new one."""
        self._ended[job.completion_id] = job
        if job.status == "failed":
            self._release_key(job)

    def remove(self, job: BackgroundJob) -> None:
        """Remove a job."""
        self._release_key(job)
        self._ended.pop(job.completion_id, None)
        del self._jobs[job.completion_id]

    def expired(self) -> list[BackgroundJob]:
        """Return the jobs whose time is over."""
        return [job for job in self if self._is_over(job)]

    def to_evict(self, keep: BackgroundJob | None = None) -> list[BackgroundJob]:
        """Return the jobs to evict, so that the others fit; never the job `keep`.

        Each is the one that ended first of the owner that holds the most, as long as that is more than its share.
        """
        ended: dict[str | None, deque[BackgroundJob]] = defaultdict(deque)
        for job in self._ended.values():
            if job is not keep:
                ended[job.record.owner].append(job)
        evicted: dict[str, BackgroundJob] = {}
        for limit, size_of, _ in self._limits:
            held = Counter[str | None]()
            for job in self:
                held[job.record.owner] += 0 if job.completion_id in evicted else size_of(job)
            while held.total() > limit:
                over = [owner for owner, jobs in ended.items() if jobs and held[owner] * len(held) > limit]
                if not over:
                    break
                job = ended[max(over, key=held.__getitem__)].popleft()
                evicted[job.completion_id] = job
                held[job.record.owner] -= size_of(job)
        return list(evicted.values())

    def _is_over(self, job: BackgroundJob) -> bool:
        """Return whether the time of a job is over. A job that ended in the future, by a wrong clock, ended now."""
        if job.completion_id not in self._ended:
            return False
        now = self._clock()
        job.finished_at = min(job.finished_at, now)
        return job.finished_at <= now - self._result_ttl_s

    def _release_key(self, job: BackgroundJob) -> None:
        if job.owner_and_key is not None and self._keys.get(job.owner_and_key) is job:
            del self._keys[job.owner_and_key]
