"""The states of a background completion, as clients and metrics see them."""

from __future__ import annotations

from typing import Literal

BackgroundStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
