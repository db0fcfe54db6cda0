"""The states of a background completion and of a batch, as clients and metrics see them."""

from __future__ import annotations

from typing import Literal, get_args

BackgroundStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
BATCH_STATUSES: tuple[BatchStatus, ...] = get_args(BatchStatus)
