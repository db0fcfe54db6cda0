"""A fleet: replicas of an engine on machines that others run, such as Ray. `FleetClient` is its only user.

A fleet knows where replicas are and which one gets a request; it need not keep one alive, nor know of tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gptserve.engine.errors import EngineError
from gptserve.engine.info import EngineInfo
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.request import TokenOutput
from gptserve.engine.scheduling.block_map import BlockMap
from gptserve.engine.stats import EngineStats


class ReplicaLostError(EngineError):
    """The replica that computed these requests is gone. Another one can go on with them."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a replica has computed since its last message, of all the requests that one client has there."""

    replica: str
    """Its name; no two replicas have the same."""
    fingerprint: str
    outputs: tuple[TokenOutput, ...]
    stats: EngineStats


class Fleet(Protocol):
    """Replicas of one engine. Call all methods on one event loop."""

    async def start(self) -> EngineInfo:
        """Wait for a replica and return its description. Raises EngineStartError."""

    def compute(self, requests: Sequence[AnyRequest]) -> AsyncGenerator[Computed]:
        """Have one replica compute all these requests to their ends.

        The first message says which one, and has no outputs. One stream of a replica carries those of all the client's
        requests there, and ends last; the other ones have no more messages. Waits while no replica has room. Raises
        ReplicaLostError if it dies, EngineDiedError if there will be no other one.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Tell all replicas to stop computing these requests."""

    def watch(self) -> AsyncGenerator[Sequence[Computed]]:
        """Tell again and again what all replicas do, each by a message without outputs, and let them know this client.

        A replica that is missing is gone, or silent.
        """

    async def look(self) -> BlockMap:
        """Return the blocks of any one replica. Raises ReplicaLostError."""

    async def close(self) -> None:
        """Let go of the replicas. Idempotent; ends a start under way."""
