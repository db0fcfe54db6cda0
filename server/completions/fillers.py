"""When fillers, which wait behind all other requests, may be submitted. `Service` and `admission.py` ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptserve.server.completions.service import Service


def check_filler_room(service: Service, owner: str | None, num_requests: int) -> None:
    """Raise ServiceError or QueueFullError unless an owner may submit so many fillers now.

    They leave half of the queue to others, and use the tokens of their owner.
    """
    service.check_open()
    service.limits.check(owner, 0)
    info = service.model.engine.info
    spare = info.max_num_seqs + info.max_num_queued_reqs - num_requests
    num_others = service.planning.num_requests - service.place.num_requests
    service.model.engine.check_room(num_requests, num_others + max(0, min(info.max_num_queued_reqs // 2, spare)))
