"""A GGUF file of a hub's repository, which has one for each way of quantizing: OWNER/REPO:Q4_K_M names one of them.

source.py calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gptserve.weights.errors import ModelNotFoundError
from gptserve.weights.gguf.folder import gguf_files, parts_of

NAMES_SHOWN = 6


def split_tag(model: str) -> tuple[str, str | None]:
    """Return the hub id and the tag of OWNER/REPO:TAG; the tag is None where there is none."""
    repo_id, colon, tag = model.partition(":")
    return repo_id, tag if colon else None


def choose_file(names: Iterable[str], tag: str | None, where: str) -> list[str]:
    """Return the file of a repository with this tag, or of its only one; of a split file all parts.

    Raises ModelNotFoundError, which names the files there are, for none or several.
    """
    found = gguf_files(names)
    if tag is not None:
        pattern = re.compile(rf"(^|[-._/]){re.escape(tag)}([-._/]|$)", re.IGNORECASE)
        matching = [name for name in found if pattern.search(name)]
    else:
        matching = found
    if len(matching) == 1:
        return parts_of(matching[0])
    shown_names = ", ".join((matching or found)[:NAMES_SHOWN]) + (
        ", ..." if len(matching or found) > NAMES_SHOWN else ""
    )
    if not found:
        raise ModelNotFoundError(f"{where} holds no *.gguf file")
    how_many = f"{len(matching)} of its GGUF files fit" if tag is not None else f"it holds {len(found)} GGUF files"
    raise ModelNotFoundError(
        f"{where} must be named with the tag of one file, as OWNER/REPO:TAG; {how_many}: {shown_names}"
    )
