"""Lets requests in before any work is done for them, within the limits of their owner, the queue and bytes.

Routes enter with `planned`; `plan.py` takes the places of the choices once it knows how many they are. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from gptserve.engine.errors import InvalidRequestError
from gptserve.server.completions.fillers import check_filler_room
from gptserve.server.completions.planning import Place
from gptserve.server.completions.service import Service

WORKER_BYTES = 2**13  # a conversation of so many bytes becomes a chat in some milliseconds in the worst case

Result = TypeVar("Result")


@contextmanager
def planned(service: Service, place: Place, num_bytes: int) -> Iterator[Service]:
    """Count a request, whose body has so many bytes, while it is planned; yield the service to plan it with.

    Raises ServiceError.
    """
    planning = replace(service, place=place)
    service.planning.enter(place)
    try:
        hold(planning, num_bytes)
        yield planning
    finally:
        leave(planning)


def hold(service: Service, num_bytes: int) -> None:
    """Count more bytes that are held for the request that is planned. Raises ServiceError."""
    with nullcontext() if service.place.is_filler else service.counting_rejections():
        service.planning.hold(service.place, num_bytes)


async def in_worker_if_large(service: Service, call: Callable[..., Result], *arguments: object) -> Result:
    """Make a call, whose time grows with the body that is planned, and return its result; let no other wait for it."""
    if service.place.num_bytes > WORKER_BYTES:
        return await service.in_worker(call, *arguments)
    return call(*arguments)


def take_places(service: Service, owner: str | None, n: int, num_prompts: int) -> None:
    """Count n choices of each prompt as waiting, in the place of what counts for the request so far.

    Raises ServiceError, QueueFullError or InvalidRequestError.
    """
    num_requests, info = n * num_prompts, service.model.engine.info
    # A request that can never be let in must not be told to try again.
    most = min(service.options.max_choices, info.max_num_seqs + info.max_num_queued_reqs)
    if num_requests > most:
        message = f"n times the number of prompts may be at most {most}, got {n} times {num_prompts}"
        raise InvalidRequestError(message, param="n")
    if not service.place.is_filler:
        service.limits.check_possible(owner, n, num_prompts)
    _take_in_place(service, owner, num_requests)


def take_inputs(service: Service, owner: str | None, num_inputs: int) -> int:
    """Count the first inputs to embed as waiting; return how many of them, and of the others, to submit at once.

    They are no more than may run and wait, so that a list may be longer than the queue. Raises what take_places does.
    """
    info, of_key = service.model.engine.info, service.limits.most_requests(owner)
    most = min(service.options.max_choices, info.max_num_seqs + info.max_num_queued_reqs)
    most = most if of_key is None else max(1, min(most, of_key))
    _take_in_place(service, owner, min(num_inputs, most))
    return most


def _take_in_place(service: Service, owner: str | None, num_requests: int) -> None:
    """Count requests as waiting, in the place of what counts so far. Raises ServiceError or QueueFullError."""
    place = service.place
    _take(service, -place.num_requests)
    if place.is_filler:  # it waits where others are refused
        check_filler_room(service, owner, num_requests)
    else:
        with service.counting_rejections():
            service.limits.check(owner, num_requests)
            service.model.engine.check_room(num_requests, service.planning.num_requests)
    _take(service, num_requests)


def _take(service: Service, num_requests: int) -> None:
    if service.planning.take(service.place, num_requests) and not service.place.is_filler:
        service.limits.note_planned(service.place.owner, num_requests)


def leave(service: Service) -> None:
    """Count a request no more, as it is planned or is not to be; does nothing if it has left."""
    place = service.place
    if service.planning.leave(place) and not place.is_filler:
        service.limits.note_planned(place.owner, -place.num_requests)
