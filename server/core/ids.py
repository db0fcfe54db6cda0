"""Ids that sort by when they were made: what lies in a folder is listed in its order after a restart, too."""

import secrets
import time


def new_id(prefix: str) -> str:
    """Return the prefix with 32 hex digits: the nanoseconds since the epoch (16), then 64 random bits."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"
