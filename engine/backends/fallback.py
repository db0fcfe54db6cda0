"""The one form of the warnings about something slower that takes the place of what cannot be used.

Checks at start call it, and so does whoever chooses without one. Torch-free.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def warn_of_fallback(part: str, used: str, instead_of: str, why: str) -> None:
    """Warn that `used` is, `instead_of` what was to compute this part. `used` says what that costs, and has a verb."""
    logger.warning("%s: %s used instead of %s: %s", part, used, instead_of, why)
