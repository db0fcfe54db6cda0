"""The stored responses: found by their owners, read, and continued by new requests.

A request goes on from them by `previous_response_id`, or names single items by `item_reference`. Knows no HTTP;
`api/responses.py` calls it.
"""

from __future__ import annotations

from typing import Any

from gptserve.server.completions.admission import hold
from gptserve.server.completions.service import Service
from gptserve.server.completions.shapes import Json
from gptserve.server.core.errors import ServiceError, show
from gptserve.server.jobs.background import BackgroundJobs
from gptserve.server.jobs.job import BackgroundJob
from gptserve.server.jobs.store import JobStoreError
from gptserve.server.responses.input_list import items_by_id
from gptserve.server.responses.plan import RESPONSE_SHAPE, ResponsePlan, input_items, output_items
from gptserve.server.responses.stream import render_response
from gptserve.server.schemas.responses import GivenItem, Item, ItemReference, ResponsesRequest, StoredRequest

_GONE = "it was not stored, it was deleted or it has expired"


class KeptResponses:
    """Reads the responses among the background jobs."""

    def __init__(self, service: Service, jobs: BackgroundJobs) -> None:
        self._service = service
        self._jobs = jobs

    async def find(self, response_id: str, owner: str | None, param: str) -> BackgroundJob:
        """Return the job of a response. Raises ServiceError."""
        job = await self._find(response_id, owner)
        if job is None:
            raise ServiceError("completion_not_found", f"response {response_id!r} does not exist: {_GONE}", param=param)
        return job

    async def plan(self, job: BackgroundJob) -> ResponsePlan:
        """Return the plan of a job. Raises ServiceError or JobStoreError."""
        plan = await self._jobs.plan(job)
        assert isinstance(plan, ResponsePlan), "find sees to it"
        return plan

    async def read(self, job: BackgroundJob, plan: ResponsePlan) -> Json:
        """Return the response so far. Raises ServiceError or JobStoreError."""
        status = job.status
        error = None if job.error is None or status != "failed" else str(job.error)
        batches = await self._jobs.outputs(job)
        return await self._service.in_thread(render_response, plan, batches, status, error)

    async def asked(self, body: ResponsesRequest, planning: Service) -> StoredRequest:
        """Return a request with the conversation that it goes on and the items that it names. Raises ServiceError.

        What is read for them counts for the request that is planned with the service.
        """
        earlier = await self._conversation(body.previous_response_id, planning)
        given = body.input if isinstance(body.input, str) else await self._resolved(body.input, planning)
        return StoredRequest.model_construct(**{**dict(body), "input": given, "earlier": earlier})

    async def _conversation(self, response_id: str | None, planning: Service) -> list[Item]:
        """Return the items of a response, its input and output, and of those before it. Raises ServiceError."""
        if response_id is None:
            return []
        job = await self.find(response_id, planning.place.owner, "previous_response_id")
        if job.status != "completed":
            message = f"previous_response_id must be of a response that has ended well; {response_id!r} is {job.status}"
            raise ServiceError("invalid_value", message, param="previous_response_id")
        hold(planning, job.num_bytes)
        plan = await self.plan(job)
        answer = await self.read(job, plan)
        return [*plan.asked.earlier, *input_items(plan.asked), *output_items(answer)]

    async def _resolved(self, items: list[GivenItem], planning: Service) -> list[Item]:
        """Return items with those that are referred to in the places of their references. Raises ServiceError."""
        resolved: list[Item] = []
        read: dict[str, dict[str, Item | Json]] = {}
        for i, item in enumerate(items):
            if not isinstance(item, ItemReference):
                resolved.append(item)
                continue
            response_id, where = _response_of(item.id), f"input[{i}]"
            if response_id not in read:
                read[response_id] = await self._items(response_id, planning, where)
            found = read[response_id].get(item.id)
            if found is None:
                message = f"{where}: item {show(item.id)} does not exist: {_GONE}"
                raise ServiceError("completion_not_found", message, param=where)
            made = output_items({"id": response_id, "output": [found]}) if isinstance(found, dict) else [found]
            resolved += made
        return resolved

    async def _items(self, response_id: str, planning: Service, where: str) -> dict[str, Item | Json]:
        """Return the items of a response by their ids: those of its output as JSON; none if there is no such response.

        Raises ServiceError.
        """
        job = await self._find(response_id, planning.place.owner)
        if job is None:
            return {}
        if not job.has_ended:
            message = f"{where}: the response of the item must have ended; {response_id!r} is {job.status}"
            raise ServiceError("invalid_value", message, param=where)
        hold(planning, job.num_bytes)
        plan = await self.plan(job)
        output: Any = (await self.read(job, plan))["output"]
        return {**items_by_id(response_id, plan.asked), **{item["id"]: item for item in output}}

    async def _find(self, response_id: str, owner: str | None) -> BackgroundJob | None:
        try:
            job = await self._jobs.find(response_id, owner)
        except JobStoreError:  # which says nothing of whether there is one
            raise
        except ServiceError:
            return None
        return job if job.record.kind == RESPONSE_SHAPE.object else None


def _response_of(item_id: str) -> str:
    """Return the id of the response that an item is of; those of its input have `_in` before their number."""
    suffix = item_id.partition("_")[2].rpartition("_")[0]
    return RESPONSE_SHAPE.id_prefix + suffix.removesuffix("_in")
