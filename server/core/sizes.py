"""Numbers of bytes as people write them."""

from __future__ import annotations

import re


def parse_size(text: str) -> int:
    """Parse a number of bytes such as 512MiB, 2GiB, 1.5GB or 4096. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size")
    unit: int = (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
