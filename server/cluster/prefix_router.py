"""Sends a prompt to the replica that had its beginning. Ray Serve makes one beside each handle; prefixes.py decides."""

from __future__ import annotations

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from gptserve.server.cluster.prefixes import beginning, ranked


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """A router of Ray Serve, in order of arrival."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica to ask first, then all others."""
        loads = [self.replica_queue_len_cache.get(each.replica_id) or 0 for each in candidate_replicas]
        names = [each.replica_id.unique_id for each in candidate_replicas]
        order = ranked(beginning(pending_request.args if pending_request else ()), names, loads)
        return [[candidate_replicas[i] for i in order[:1]], [candidate_replicas[i] for i in order[1:]]]
