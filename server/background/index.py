"""The index of background jobs in memory: by id, by owner with idempotency key, and in the order of their ends.

It says which jobs must go: those whose time is over, and those that ended first where there are too many. `store.py`
calls it, and deletes them in the journal. Knows neither the journal nor the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from gptserve.server.background.job import BackgroundJob, OwnerAndKey
from gptserve.server.errors import ServiceError
from gptserve.server.settings import ServerSettings


class JobIndex:
    """All jobs. Invariants: a key leads to one job that has not failed; a job whose time is over is not found."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._jobs: dict[str, BackgroundJob] = {}
        self._ended: dict[str, BackgroundJob] = {}
        self._keys: dict[OwnerAndKey, BackgroundJob] = {}

    def __iter__(self) -> Iterator[BackgroundJob]:
        return iter(self._jobs.values())

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
        return Counter(job.status for job in self)

    def find(self, completion_id: str) -> BackgroundJob | None:
        """Return a job by its id."""
        job = self._jobs.get(completion_id)
        return None if job is None or self._is_over(job) else job

    def find_by_key(self, owner_and_key: OwnerAndKey) -> BackgroundJob | None:
        """Return the job that began with this key of this owner."""
        job = self._keys.get(owner_and_key)
        return None if job is None or self._is_over(job) else job

    def check_room(self) -> None:
        """Raise ServiceError if the jobs that have not ended, which nothing replaces, are as many as may be kept."""
        running = [job for job in self if job.completion_id not in self._ended]
        num_bytes = sum(job.num_bytes for job in running)
        for number, limit, unit in (
            (len(running), self._settings.max_results, "background or keyed completions are running"),
            (num_bytes, self._settings.max_results_bytes, "bytes of background or keyed completions that run are kept"),
        ):
            if number >= limit:
                message = f"{number} {unit}, and the limit is {limit}"
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

    def surplus(self, spared: BackgroundJob) -> list[BackgroundJob]:
        """Return the jobs that must make room for the others: those that ended first, but not the one `spared`."""
        num_over = len(self._jobs) - self._settings.max_results
        num_bytes_over = sum(job.num_bytes for job in self) - self._settings.max_results_bytes
        surplus = []
        for job in self._ended.values():
            if num_over <= 0 and num_bytes_over <= 0:
                break
            if job is not spared:
                surplus.append(job)
                num_over -= 1
                num_bytes_over -= job.num_bytes
        return surplus

    def _is_over(self, job: BackgroundJob) -> bool:
        """Return whether the time of a job is over. A job that ended in the future, by a wrong clock, ended now."""
        if job.completion_id not in self._ended:
            return False
        now = self._clock()
        job.finished_at = min(job.finished_at, now)
        return job.finished_at <= now - self._settings.result_ttl_s

    def _release_key(self, job: BackgroundJob) -> None:
        if job.owner_and_key is not None and self._keys.get(job.owner_and_key) is job:
            del self._keys[job.owner_and_key]
