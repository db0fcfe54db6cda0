"""The shapes of the routes of batches."""

from __future__ import annotations

from typing import Literal

from gptserve.server.core.background_status import BatchStatus
from gptserve.server.schemas.base import _Model, _Page, _RequestModel
from gptserve.server.schemas.responses import Metadata


class OutputExpiry(_RequestModel):
    """When the files of a batch expire."""

    anchor: Literal["created_at"]
    seconds: int
    """after the files were written"""


class BatchRequest(_RequestModel):
    """What to begin a batch with."""

    input_file_id: str
    endpoint: str
    """the url of all its lines"""
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchError(_Model):
    """What is wrong with a line of the input, or with the whole of it."""

    code: str
    message: str
    param: str | None
    line: int | None
    """counted from 1"""


class BatchErrors(_Model):
    """The first errors of a batch that failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(_Model):
    """How many lines there are, and how they have ended so far."""

    total: int
    completed: int
    failed: int


class BatchObject(_Model):
    """A batch. Times are in seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None
    """the answers, in the order of their lines"""
    error_file_id: str | None
    """the errors of lines that failed or were not computed in time"""
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(_Page):
    """A page of the batches of a key, newest first."""

    data: list[BatchObject]
