"""What a store adds that several servers have at once: who of them is alive, and which of them has which completion.

A server that has joined has a lease on each completion that it computes. It keeps all of them by renewing its own
membership. If it does not, another server reaps it, which frees its leases, and whoever claims them goes on with the
completions. `mirror.py` and `replica.py` call this; `postgres/` implements it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from gptserve.server.jobs.records import StoredJob


class SharedJob(NamedTuple):
    """A completion as the store has it now: num_tokens were generated so far, and it is to end if `is_cancelled`."""

    stored: StoredJob
    num_tokens: int
    is_cancelled: bool


class Leases(NamedTuple):
    """The completions that a server has leases on, and of each if it is to be cancelled; and if any may be taken."""

    held: Mapping[str, bool]
    are_some_free: bool


class Sharing(Protocol):
    """The part of a JobStore that is about its servers.

    Fence: what a server writes counts only while it is a member, and `append`, `add_attempt` and `end` of the store
    only while it has the lease; they raise LeaseLostError otherwise. So two servers never write one completion at once.

    Errors: all methods raise JobStoreError, StoreUnavailableError if the store cannot be reached, and no other error.
    """

    @property
    def ttl_s(self) -> float:
        """How long a server that does not renew its membership keeps it, in seconds by the store's clock."""

    async def join(self) -> None:
        """Become a member, a new one each time, without leases."""

    async def leave(self) -> None:
        """Give up the membership and all leases, which others may claim at once. Does nothing for one that has left."""

    async def renew(self, fingerprints: Collection[str]) -> bool:
        """Renew the membership; return whether there still was one. The fingerprints are those of its models."""

    async def reap(self) -> int:
        """End the memberships that were not renewed in time; return their number."""

    async def leases(self, fingerprints: Collection[str]) -> Leases:
        """Return the leases of this server, and whether there are any that `claim` could take. It only reads."""

    async def claim(self, fingerprints: Collection[str], limit: int) -> list[str]:
        """Take the leases of at most `limit` completions that nobody has; return their ids, the oldest first.

        They are of these fingerprints, or of some that no member has had for FORGOTTEN_AFTER_S. Those that are to be
        cancelled come first, do not count and may be of any.
        """

    async def release(self, completion_ids: Iterable[str]) -> None:
        """Give up leases of this server, for anybody to claim."""

    async def cancel(self, completion_id: str) -> None:
        """Ask whoever has the lease of a completion to end it, or whoever claims it."""

    async def ids(self) -> list[str]:
        """Return the ids of all completions, in the order of JobStore.load."""

    async def find(self, completion_ids: Collection[str]) -> list[SharedJob]:
        """Return the completions with these ids that exist, in the order of JobStore.load."""

    async def find_by_key(self, owner: str | None, key: str) -> SharedJob | None:
        """Return the completion that has an idempotency key of an owner; one that failed has it no more."""


FORGOTTEN_AFTER_S = 600.0  # a rollout that replaces servers one by one still has some of the former version
